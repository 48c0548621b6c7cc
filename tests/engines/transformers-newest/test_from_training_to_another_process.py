"""Train a plugged model with and without LoRA, save it, and use it in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf

import gfsa

hf.logging.set_verbosity_error()

IDS = torch.arange(5, 13)[None]
BEAMS = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}

LOADED = {
    "whole model": "gfsa.from_pretrained(AutoModelForCausalLM, folder / 'saved')",
    "adapter": "gfsa.load_peft(base, folder / 'saved')",
    "adapter, merged": "gfsa.load_peft(base, folder / 'saved').merge_and_unload()",
    "adapter, merged and saved": "gfsa.from_pretrained(AutoModelForCausalLM, folder / 'merged')",
}
"""How the other process loads, by what was saved."""

# imports nothing of the tests: it is what a user's own program would be
OTHER_PROCESS = """
import sys, pathlib, torch, gfsa
from transformers import AutoModelForCausalLM
folder = pathlib.Path(sys.argv[1])
base = AutoModelForCausalLM.from_pretrained(folder / 'base')
model = {load}.eval()
ids = torch.arange(5, 13)[None]
with torch.no_grad():
    logits = model(ids).logits
tokens = model.generate(input_ids=ids, max_new_tokens=8, num_beams=3, do_sample=False)
torch.save([logits, tokens, len(gfsa.filters_of(model))], folder / 'found.pt')
"""


class FilterTrainer(gfsa.FilterRate, hf.Trainer):
    """The trainer that the page about trainers shows."""


def base() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, pad_token_id=0))


def train(model: Any, folder: Path) -> hf.Trainer:
    rows = torch.randint(3, 61, (40, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = hf.TrainingArguments(
        str(folder / "run"),
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = FilterTrainer(model=model, args=arguments, train_dataset=data, filter_lr=0.1)
    trainer.train()
    return trainer


@pytest.mark.parametrize("how", LOADED)
def test_ten_steps_and_another_process(
    how: str, tmp_path: Path, record: Callable[[str, str], None]
) -> None:
    model = base()
    model.save_pretrained(tmp_path / "base")
    gfsa.plug(model, K=3)
    if how != "whole model":
        targets = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["gfsa"]}
        model = peft.get_peft_model(model, peft.LoraConfig(**targets, task_type="CAUSAL_LM"))
    trainer = train(model, tmp_path)
    thetas = [filter.theta for filter in gfsa.filters_of(model).values()]
    assert all(theta.abs().max() > 0.1 for theta in thetas)
    trainer.save_model(tmp_path / "saved")
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    tokens = model.generate(input_ids=IDS, **BEAMS)
    if how == "adapter, merged and saved":
        model.merge_and_unload().save_pretrained(tmp_path / "merged")

    program = OTHER_PROCESS.format(load=LOADED[how])
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    found, generated, filters = torch.load(tmp_path / "found.pt")
    assert filters == 2
    assert torch.equal(generated, tokens)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    check = f"`Trainer` with `FilterRate`, saved, loaded by another process: {how}"
    record(check, "the same tokens, 3 beams")
