"""Coefficients over training: recorded, to CSV and back, by layer and head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gfsa
from gfsa.lens.trajectory import Trajectory
from support.tiny import TinyEncoder


def moving_model(steps: int = 3) -> tuple[TinyEncoder, Trajectory]:
    """Filters in layers 2 and 4 of four, whose θ grows by 0.25 from step to step of ten."""
    model = TinyEncoder(depth=4)
    gfsa.plug(model, layers="even")
    trajectory = Trajectory()
    for at in range(steps):
        trajectory.record(model, 10 * at)
        with torch.no_grad():
            for graph_filter in gfsa.filters_of(model).values():
                graph_filter.theta += 0.25
    return model, trajectory


def test_every_step_has_the_coefficients_of_that_step() -> None:
    model, trajectory = moving_model()
    assert trajectory.steps == [0, 10, 20]
    assert [layer.depth for layer in trajectory.layers] == [2, 4]
    assert [layer.name for layer in trajectory.layers] == list(gfsa.filters_of(model))
    # c = (w0, w1 + (2−K)·wK, (K−1)·wK) with K = 3, and each w moves by 0.25 a step
    rows = [step[0] for step in trajectory.layers[0].coefficients]
    assert rows == [[0.0, 1.0, 0.0], [0.25, 1.0, 0.5], [0.5, 1.0, 1.0]]


def test_csv_and_back(tmp_path: Path) -> None:
    _, trajectory = moving_model()
    path = tmp_path / "coefficients.csv"
    trajectory.to_csv(path)
    head, first, *rest = path.read_text().splitlines()
    assert head == "step,layer,name,head,c0,c1,c2"
    assert first.split(",")[:2] == ["0", "2"]
    # three steps, two layers, four heads
    assert len(rest) + 1 == 3 * 2 * 4
    again = Trajectory.from_csv(path)
    assert again == trajectory
    assert Trajectory.from_plain(again.to_plain()) == trajectory
    again.layers[0].name = "=cmd|' /C calc'!A0"
    assert ",'=cmd|" in again.to_text()


def test_layers_of_different_degree_share_a_file(tmp_path: Path) -> None:
    model = TinyEncoder(depth=2)
    gfsa.plug(model, layers=[1], K=None, learn=("w0", "w1"))
    gfsa.plug(model, layers=[2])
    trajectory = Trajectory()
    trajectory.record(model, 0)
    trajectory.to_csv(tmp_path / "c.csv")
    assert Trajectory.from_csv(tmp_path / "c.csv") == trajectory
    assert [len(layer.coefficients[0][0]) for layer in trajectory.layers] == [2, 3]


def test_filters_that_do_not_learn_are_left_out() -> None:
    model = TinyEncoder(depth=2)
    gfsa.plug(model, filter=gfsa.Twicing)
    trajectory = Trajectory()
    trajectory.record(model, 0)
    assert trajectory.layers == []


def test_a_changed_model_and_a_repeated_step_are_refused() -> None:
    model, trajectory = moving_model()
    with pytest.raises(ValueError, match="expected a step after 20"):
        trajectory.record(model, 20)
    gfsa.unplug(model)
    with pytest.raises(ValueError, match="filters have changed"):
        trajectory.record(model, 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,loss\n1,2\n", "expected the columns step, layer, name, head, c0"),
        ("", "got none"),
        ("step,layer,name,head,c0\n", "no step was recorded"),
        ("step,layer,name,head,c0\n0,1,a,1,0.5\n0,1,a,3,0.5\n", "out of order"),
        ("step,layer,name,head,c0\n0,1,a,1,0.5\n0,2,b,1,0.5\n5,1,a,1,0.5\n", "1 of 2 steps"),
        ("step,layer,name,head,c0\n0,1,a,1,many\n", "damaged"),
        # a missing c0 must not make c0 of c1, nor a line that is cut off a filter of lower degree
        ("step,layer,name,head,c0,c1\n0,1,a,1,,0.5\n", "damaged"),
        ("step,layer,name,head,c0,c1\n0,1,a,1,0,1\n0,1,a,2,0\n", "as many heads"),
        (
            "step,layer,name,head,c0\n0,1,a,1,0\n0,1,a,2,0\n5,1,a,1,0\n",
            "as many heads and coefficients",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Trajectory.from_csv(path)
