"""Training a plugged transformers model with transformers' Trainer and accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor

import gfsa
from support.training import (
    batch_for,
    learned,
    plugged,
    same,
)
from support.zoo import VOCABULARY


def examples(count: int = 16) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(3, VOCABULARY, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.mark.usefixtures("accelerate_alone")
class TestTrainer:
    def trainer(self, model: Any, folder: Path, **options: Any) -> transformers.Trainer:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            save_steps=2,
            logging_steps=100,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
        )
        return transformers.Trainer(model, arguments, train_dataset=examples(), **options)

    def fresh(self) -> Any:
        model = plugged("gpt2", dropout=0.1)
        return model.train()

    def test_filters_learn(self, tmp_path: Path) -> None:
        model = self.fresh()
        before = learned(model)
        self.trainer(model, tmp_path).train()
        for name, theta in learned(model).items():
            assert (theta != before[name]).all(), name
            assert theta.isfinite().all(), name

    def test_a_run_that_is_resumed_ends_where_it_would_have(self, tmp_path: Path) -> None:
        whole = self.fresh()
        self.trainer(whole, tmp_path / "whole").train()

        resumed = self.fresh()
        halfway = tmp_path / "whole" / "checkpoint-2"
        self.trainer(resumed, tmp_path / "resumed").train(resume_from_checkpoint=str(halfway))
        assert same(learned(resumed), learned(whole))

    def test_its_checkpoints_are_models(self, tmp_path: Path) -> None:
        model = self.fresh()
        self.trainer(model, tmp_path).train()
        loaded = gfsa.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "checkpoint-4")
        assert same(learned(loaded), learned(model))
        batch = batch_for("gpt2")
        assert torch.equal(loaded.eval()(**batch)[0], model.eval()(**batch)[0])


@pytest.mark.usefixtures("accelerate_alone")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = plugged("gpt2").train()
    optimizer = torch.optim.AdamW(gfsa.parameter_groups(model, lr=1e-4, filter_lr=1e-2))
    loader = torch.utils.data.DataLoader(examples(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    before = learned(model)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    after = learned(model)
    assert all((after[name] != before[name]).all() for name in before)

    gfsa.save(model, tmp_path)
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    gfsa.unplug(bare)
    gfsa.load(bare, tmp_path)
    assert same(learned(bare), after)
