"""Groups, rates and schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gfsa
from gfsa_experiments.engine.config import TrainConfig
from gfsa_experiments.engine.optimiser import build_optimiser, set_learning_rate, share_of_peak
from gfsa_experiments.runs.methods import MethodConfig, added_parameters, find_method
from support.toy_recipe import ToyModel


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4, 8))
        self.linear = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.filter = nn.Parameter(torch.zeros(2, 3))

    def no_weight_decay(self) -> set[str]:
        return {"position"}


def test_every_parameter_is_in_one_group_and_only_weights_are_decayed() -> None:
    model = _Model()
    config = TrainConfig(lr=1e-3, weight_decay=0.1)
    optimiser = build_optimiser(model, [model.filter], config, filter_lr=1e-2)
    found = {id(p): group for group in optimiser.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimiser.param_groups) == len(found) == 4
    assert found[id(model.linear.weight)]["weight_decay"] == 0.1
    for spared in (model.position, model.linear.bias, model.filter):
        assert found[id(spared)]["weight_decay"] == 0.0
    assert found[id(model.filter)]["lr"] == 1e-2
    assert found[id(model.linear.weight)]["lr"] == 1e-3
    assert set_learning_rate(optimiser, config, 50, 100) == pytest.approx(5e-4)
    assert found[id(model.filter)]["lr"] == pytest.approx(5e-3)


def test_gains_may_have_a_rate_of_their_own() -> None:
    model = _Model()
    config = TrainConfig(lr=1e-3, gain_lr=0.1)
    optimiser = build_optimiser(model, [model.filter], config, filter_lr=None)
    found = {id(p): group["lr"] for group in optimiser.param_groups for p in group["params"]}
    assert found[id(model.linear.bias)] == 0.1
    assert found[id(model.linear.weight)] == found[id(model.filter)] == 1e-3


@pytest.mark.parametrize("gain_lr", [None, 0.1])
@pytest.mark.parametrize("method", ["plain", "degree1", "gfsa", "twicing"])
def test_groups_are_those_that_users_get(method: str, gain_lr: float | None) -> None:
    """What is measured on a model of transformers or torch is ``gfsa.parameter_groups`` alone."""
    model = ToyModel(0.0)
    options = MethodConfig(filter_lr=1e-2 if method in ("degree1", "gfsa") else None)
    find_method(method).apply(model, options)
    config = TrainConfig(lr=1e-3, weight_decay=0.1, gain_lr=gain_lr)
    groups = build_optimiser(model, added_parameters(model), config, options.filter_lr).param_groups
    rate = 1e-3 if gain_lr is None else gain_lr
    users = gfsa.parameter_groups(model, 1e-3, options.filter_lr, 0.1, gain_lr=rate)
    assert len(groups) == (3 if options.filter_lr else 2)
    for ours, theirs in zip(groups, users, strict=True):
        assert [id(p) for p in ours["params"]] == [id(p) for p in theirs["params"]]
        assert {name: ours[name] for name in ("name", "lr", "weight_decay")} == {
            name: theirs[name] for name in ("name", "lr", "weight_decay")
        }


def test_what_a_baseline_adds_is_where_filters_are() -> None:
    model = ToyModel(0.0)
    find_method("layerscale").apply(model, MethodConfig())
    added = added_parameters(model)
    groups = build_optimiser(model, added, TrainConfig(lr=1e-3), filter_lr=1e-2).param_groups
    assert [group["name"] for group in groups] == ["weights", "biases", "filters"]
    assert [id(p) for p in groups[2]["params"]] == [id(p) for p in added]
    assert groups[2]["lr"] == 1e-2


def test_schedules_rise_fall_and_end_where_told() -> None:
    linear = TrainConfig(warmup=0.1, schedule="linear")
    assert [share_of_peak(linear, s, 100) for s in (0, 9, 10, 55)] == [0.1, 1.0, 1.0, 0.5]
    cosine = TrainConfig(schedule="cosine", min_lr=0.2)
    assert share_of_peak(cosine, 50, 100) == pytest.approx(0.6)
    assert share_of_peak(cosine, 100, 100) == pytest.approx(0.2)
    assert share_of_peak(TrainConfig(schedule="constant"), 70, 100) == 1.0


def test_filters_alone_may_learn() -> None:
    model = _Model().requires_grad_(False)
    model.filter.requires_grad_(True)
    optimiser = build_optimiser(model, [model.filter], TrainConfig(), filter_lr=0.0)
    (group,) = optimiser.param_groups
    # zero is a rate like any other
    assert group["lr"] == 0.0
    model.filter.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        build_optimiser(model, [model.filter], TrainConfig(), filter_lr=None)


def test_wsd_stays_and_falls_at_the_end() -> None:
    wsd = TrainConfig(schedule="wsd", warmup=0.1, decay=0.2, min_lr=0.1)
    wsd.check()
    assert [share_of_peak(wsd, s, 100) for s in (0, 9, 10, 79, 80)] == [0.1, 1.0, 1.0, 1.0, 1.0]
    assert share_of_peak(wsd, 90, 100) == pytest.approx(0.55)
    assert share_of_peak(wsd, 99, 100) == pytest.approx(0.145)
    assert "decay" not in wsd.unused()
    assert "decay" in TrainConfig(schedule="cosine").unused()
    with pytest.raises(ValueError, match="decay must lie"):
        TrainConfig(schedule="wsd", decay=0.0).check()
