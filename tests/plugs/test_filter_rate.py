"""A learning rate of the filters' own, in trainers that build their optimiser themselves."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor

import gfsa
from gfsa.plugs.optim import give_rate, refuse_scheduler_from_config
from support.zoo import VOCABULARY, learned, plugged, same

pytestmark = pytest.mark.usefixtures("accelerate_alone")

MODEL_LR, FILTER_LR = 1e-4, 1e-2


class FilterTrainer(gfsa.FilterRate, transformers.Trainer):
    pass


def examples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(3, VOCABULARY, (16, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def gpt2() -> Any:
    return plugged("gpt2", dropout=0.1).train()


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    options = {"learning_rate": MODEL_LR, "max_steps": 4, "logging_steps": 1} | options
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        weight_decay=0.1,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
        **options,
    )


def trainer(model: Any, folder: Path, cls: Any = FilterTrainer, **options: Any) -> Any:
    extra = {"filter_lr": FILTER_LR} if cls is FilterTrainer else {}
    return cls(model, arguments(folder, **options), train_dataset=examples(), **extra)


def filter_ids(model: Any) -> set[int]:
    return {id(filter.theta) for filter in gfsa.filters_of(model).values()}


class TestTrainer:
    def test_the_filters_have_a_group_of_their_own(self, tmp_path: Path) -> None:
        model = gpt2()
        plain = trainer(model, tmp_path, transformers.Trainer).create_optimizer()
        before = [(group["weight_decay"], len(group["params"])) for group in plain.param_groups]
        optimizer = trainer(model, tmp_path).create_optimizer()
        decayed, rest, filters = optimizer.param_groups
        assert {id(p) for p in filters["params"]} == filter_ids(model)
        assert (filters["lr"], filters["weight_decay"]) == (FILTER_LR, 0.0)
        # the other groups are Trainer's own, less the filters
        taken = len(filters["params"])
        assert before == [(0.1, len(decayed["params"]) + taken), (0.0, len(rest["params"]))]
        assert decayed["lr"] == rest["lr"] == MODEL_LR
        assert {key: filters[key] for key in ("betas", "eps")} == {
            key: decayed[key] for key in ("betas", "eps")
        }

    def test_rates_are_scheduled_alike_and_logged(self, tmp_path: Path) -> None:
        model = gpt2()
        before = learned(model)
        run = trainer(model, tmp_path, lr_scheduler_type="linear")
        run.train()
        rows = [row for row in run.state.log_history if "learning_rate" in row]
        falling = torch.tensor([1.0, 0.75, 0.5, 0.25])
        for name, rate in (("learning_rate", MODEL_LR), ("filter_learning_rate", FILTER_LR)):
            torch.testing.assert_close(torch.tensor([row[name] for row in rows]), rate * falling)
        # Adam moves a number by at most about its rate a step
        moved = max((theta - before[name]).abs().max() for name, theta in learned(model).items())
        assert 1e-2 < moved <= 2.5e-2 * 1.01

    def test_a_run_that_is_resumed_ends_where_it_would_have(self, tmp_path: Path) -> None:
        whole = gpt2()
        trainer(whole, tmp_path / "whole").train()
        resumed = gpt2()
        halfway = tmp_path / "whole" / "checkpoint-2"
        trainer(resumed, tmp_path / "resumed").train(resume_from_checkpoint=str(halfway))
        assert same(dict(resumed.state_dict()), dict(whole.state_dict()))


def frozen_by_peft(run: Any) -> None:
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    run.model = peft.get_peft_model(run.model, config)


def of_other_weights(run: Any) -> None:
    run.optimizer = torch.optim.SGD([run.model.transformer.wte.weight], lr=0.1)


def with_a_rate(run: Any) -> None:
    run.optimizer = torch.optim.AdamW(gfsa.parameter_groups(run.model, lr=1e-4, filter_lr=1e-3))


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (frozen_by_peft, r"no parameters to act on.*modules_to_save"),
        (lambda run: gfsa.unplug(run.model), r"has no filters; gfsa\.plug"),
        (of_other_weights, r"SGD does not hold.*lr_multiplier"),
        (with_a_rate, r"group of filters with lr=0\.001"),
    ],
)
def test_filters_that_cannot_have_the_rate(prepare: Any, message: str, tmp_path: Path) -> None:
    run = trainer(gpt2(), tmp_path)
    prepare(run)
    with pytest.raises(ValueError, match=message):
        run.create_optimizer()


def test_the_wrong_order_of_bases() -> None:
    with pytest.raises(TypeError, match=r"must stand before.*\(Trainer, FilterRate\)"):
        type("Wrong", (transformers.Trainer, gfsa.FilterRate), {})


def test_filters_are_no_matrix_for_muon() -> None:
    """A split by hand takes the numbers of filters, which have two dimensions, for matrices."""
    model = gpt2()
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=MODEL_LR)
    with pytest.warns(UserWarning, match=r"Muon has the filters .*attn.*the filters to AdamW"):
        muon.step()
    groups = {g["name"]: g for g in gfsa.parameter_groups(model, lr=MODEL_LR)}
    right = torch.optim.Muon([p for p in groups["weights"]["params"] if p.ndim == 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in (muon, right, torch.optim.AdamW(groups.values())):
            optimizer.step()


def test_a_scheduler_from_deepspeeds_config() -> None:
    with pytest.raises(ValueError, match=r"Remove it from the config.*lr_multiplier"):
        refuse_scheduler_from_config(DummyScheduler(None))
    refuse_scheduler_from_config(DummyScheduler(None, lr_scheduler_callable=lambda o: o))


@pytest.mark.parametrize("grouped", [False, True])
def test_what_stands_for_an_optimizer_from_deepspeeds_config(grouped: bool) -> None:
    model = gpt2()
    parameters = list(model.parameters())
    optimizer = DummyOptim([{"params": iter(parameters), "lr": 1.0}] if grouped else parameters)
    for _ in range(2):
        give_rate(optimizer, model, FILTER_LR)
        rest, filters = optimizer.params
        assert {id(p) for p in filters["params"]} == filter_ids(model)
        assert filters["lr"] == FILTER_LR
        assert {id(p) for p in rest["params"]} == {id(p) for p in parameters} - filter_ids(model)
