"""From training to serving: torchtitan trains and exports, vLLM gives transformers' text.

vLLM runs in the environment of its own tests, which is built if it is missing.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu import use_cpu
from transformers import AutoModelForCausalLM, AutoTokenizer

import gfsa
from engines.run import ENGINES, build

use_cpu()

import runs  # noqa: E402
import tiny  # noqa: E402

NEW_TOKENS = 40
TOLERANCE = 1e-5
PROMPTS = [" ".join(f"w{2 + (7 * n * n + n + 3) % 94}" for n in range(m)) for m in (1, 6, 17, 70)]

Text = tuple[str, list[float]]
"""A generated text, and the log-probability of each of its tokens."""


@pytest.fixture(scope="module")
def vllm() -> Path:
    """The Python of vLLM's environment."""
    return build(ENGINES["vllm"])


# so few steps that a text still depends on more than the word before
@pytest.mark.parametrize(("name", "steps", "files"), [("llama", 8, 2), ("qwen", 20, 1)])
def test_a_trained_model_is_served(
    name: str,
    steps: int,
    files: int,
    vllm: Path,
    tmp_path: Path,
) -> None:
    assets = tmp_path / "assets"
    tiny.write_assets(assets, name)
    if files > 1:
        tiny.write_index(assets, name)
    run = runs.train(
        tmp_path / "run",
        name,
        assets,
        *("--training.local_batch_size", str(tiny.BATCH // 2)),
        filters=runs.overrides(rate=0.3),
        checkpoint=("last_save_in_hf",),
        processes=2,
        steps=steps,
    )
    assert run.losses[-1] < run.losses[0] - 0.5, "the model learned too little"
    folder = run.checkpoint(steps)
    assert len(list(folder.glob("model-*.safetensors"))) == files

    expected = generated(folder, with_filters=True)
    # a filter that changed nothing, or a text of one word, would hide an error
    plain = generated(folder, with_filters=False)
    assert all(a[0] != b[0] for a, b in zip(expected, plain, strict=True))
    assert min(len(set(text.split())) for text, _ in expected) > 5

    found = served(vllm, folder, tmp_path / "answer.json")
    # vLLM's text begins with the space before its first word
    assert [text.removeprefix(" ") for text, _ in found] == [text for text, _ in expected]
    worst = max(
        abs(a - b)
        for (_, ours), (_, wanted) in zip(found, expected, strict=True)
        for a, b in zip(ours, wanted, strict=True)
    )
    assert worst < TOLERANCE


@torch.no_grad()
def generated(folder: Path, *, with_filters: bool) -> list[Text]:
    """What transformers generates."""
    model = gfsa.from_pretrained(AutoModelForCausalLM, folder).eval()
    assert len(gfsa.filters_of(model)) == tiny.LAYERS
    if not with_filters:
        gfsa.unplug(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(
            ids,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[0, ids.shape[1] :]
        rows = torch.cat(out.logits).log_softmax(-1)
        texts.append((tokenizer.decode(tokens), rows.gather(1, tokens[:, None])[:, 0].tolist()))
    return texts


def served(python: Path, folder: Path, answer: Path) -> list[Text]:
    """What vLLM generates."""
    done = subprocess.run(
        [str(python), str(runs.HERE / "serve_by_vllm.py"), str(folder), str(answer)],
        input=json.dumps({"prompts": PROMPTS, "new_tokens": NEW_TOKENS}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return [(text, logprobs) for text, logprobs in json.loads(answer.read_text())]
