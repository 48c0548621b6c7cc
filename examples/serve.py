"""Serve a plugged model: load it, keep its cache static, compile the decoding step.

pip install '.[transformers]';  python examples/serve.py --new-tokens 48
"""

import argparse
import tempfile
import time

import torch
import transformers

import gfsa

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--new-tokens", type=int, default=48)
# of torch.compile; on a CPU, inductor's C++ compiler takes more than a minute
backend = "inductor" if torch.cuda.is_available() else "aot_eager"
parser.add_argument("--backend", default=backend)


def trained_model(folder: str) -> None:
    """Stands for your own: a model with filters, saved by transformers."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    gfsa.plug(model, K=3, w0=-0.1, wK=0.2)
    model.save_pretrained(folder)


def timed(model, prompt, **options) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    tokens = model.generate(prompt, do_sample=False, **options)
    return tokens, time.perf_counter() - start


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trained_model(folder)
        model = gfsa.from_pretrained(transformers.AutoModelForCausalLM, folder).eval()
    prompt = torch.randint(256, (1, 16))
    length = {"max_new_tokens": options.new_tokens}
    expected, eager = timed(model, prompt, **length)

    # A·v of past tokens is cached beside keys and values: a new token is one step, compiled once
    model.generation_config.cache_implementation = "static"
    model.forward = torch.compile(model.forward, fullgraph=True, backend=options.backend)
    _, first = timed(model, prompt, **length)
    tokens, compiled = timed(model, prompt, **length)
    assert torch.equal(tokens, expected), "the static cache must give the same tokens"
    print(f"the same {options.new_tokens} tokens; first call {first:.1f} s with compilation")
    for name, seconds in {"eager": eager, "compiled": compiled}.items():
        print(f"{name}: {options.new_tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
