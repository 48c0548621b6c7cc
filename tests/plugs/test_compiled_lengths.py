"""Lengths that a compiled token counts: the compiler's code has to know each of them by its name.

A window's number of tokens is a Python int that grows: from the second compilation on it is a
symbol, an input and an output of the graph. Torch 2.11 names two inputs that are equal by one of
them, and need not define that one. Powers have no such number beside their layer's.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

from torch._inductor import compile_fx  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402

import gfsa  # noqa: E402
from gfsa.kernels import decode as kernels  # noqa: E402
from gfsa.operators import past as cached  # noqa: E402

# with fewer, symbols may happen to be named by those that are defined
LAYERS, WINDOW, PROMPT, TOKENS = 4, 4, 2, 8


def mistral(window: int | None, degree: int) -> Any:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=window,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.MistralForCausalLM(config).eval()
    if degree == 1:
        gfsa.plug(model, K=None, w0=0.2, w1=0.9)
    else:
        gfsa.plug(model, K=3, w0=0.2, w1=0.9, wK=-0.3)
    return model


class WrittenError(Exception):
    """The compiler has written its code, which need not be built."""


def codes_of(model: Any, cache: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Any]:
    """The compiler's code for each kind of token that it was asked for, and the logits."""
    codes: list[str] = []

    def stop(lowering: Any) -> Any:
        code, _ = lowering.codegen()
        codes.append(code.value)
        raise WrittenError

    def compiler(module: Any, inputs: Any) -> Any:
        with pytest.raises(Exception, match="Written"):
            compile_fx.compile_fx(module, inputs)
        return module.forward

    monkeypatch.setattr(GraphLowering, "compile_to_module", stop)
    torch.compiler.reset()
    # pytest's own patches would leave the settings hidden
    gradients = torch._functorch.config.patch(enable_autograd_cache=False)
    graphs = torch._inductor.config.patch(fx_graph_cache=False)
    ids = torch.randint(1, 32, (2, TOKENS))
    rows = []
    with torch.no_grad(), gradients, graphs:
        wanted = model(ids, use_cache=False).logits[:, PROMPT:]
        model(ids[:, :PROMPT], past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, backend=compiler)
        for at in range(PROMPT, TOKENS):
            token, position = ids[:, at : at + 1], torch.full((2, 1), at)
            rows.append(step(token, past_key_values=cache, position_ids=position).logits)
    torch.compiler.reset()
    return codes, (torch.cat(rows, 1), wanted)


def symbols_of(code: str) -> tuple[set[str], set[str]]:
    """Symbols that the Python code uses, and those that it defines."""
    body = code[code.rindex("def call(") :]
    return set(re.findall(r"\bs\d+\b", body)), set(re.findall(r"^ +(s\d+) = ", body, re.MULTILINE))


# up to a minute each: the compiler writes the code of a whole model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "cache", "window", "degree"),
    [
        ("torch", "static", WINDOW, 2),
        ("kernel", "static", WINDOW, 2),
        ("kernel", "dynamic", WINDOW, 2),
        ("kernel", "dynamic", None, 1),
    ],
)
def test_the_code_of_a_token_defines_what_it_uses(
    way: str, cache: str, window: int | None, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mistral(window, degree)
    if way == "kernel":
        monkeypatch.setattr(cached, "refusal_of_decoding", lambda *_: None)
        # what is written is looked at, and not computed
        monkeypatch.setattr(kernels, "_run", lambda q, *_, **__: torch.zeros_like(q))
    made: Any = (
        transformers.StaticCache(config=model.config, max_cache_len=TOKENS)
        if cache == "static"
        else transformers.DynamicCache(config=model.config)
    )
    codes, (found, wanted) = codes_of(model, made, monkeypatch)
    if way != "kernel":
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
    calls = [code.count("torch.ops.gfsa.decode.default(") for code in codes]
    assert calls == [LAYERS if way == "kernel" else 0] * len(codes)
    # at first for the length that there is, then for those that follow, and for a full window
    assert len(codes) == (2 if window is None else 3)
    used = [symbols_of(code) for code in codes]
    for names, defined in used:
        assert names == defined
    if cache == "static":
        # the number of each layer, and no other
        assert [len(names) for names, _ in used] == [0, LAYERS, LAYERS]
