"""Parameters of which a process has nothing between forwards, as ZeRO-3 leaves them.

DeepSpeed is not installed here: a stand-in empties parameters and gathers them as it does. The real
one is tried by ``make engines``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gfsa
from gfsa.plugs.sites import plugged_sites
from support.tiny import TinyEncoder


def partition(model: nn.Module) -> dict[int, torch.Tensor]:
    """Empty every parameter; what it was is returned by the number that it is given."""
    whole = {}
    for number, parameter in enumerate(model.parameters()):
        whole[number] = parameter.detach().clone()
        parameter.ds_id, parameter.ds_shape = number, parameter.shape
        parameter.data = torch.empty(0)
    return whole


@pytest.fixture
def zero(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``deepspeed.zero.GatheredParameters`` that fills parameters from ``zero.whole``."""
    state = SimpleNamespace(whole={}, gathered=[])

    @contextmanager
    def gather(parameters: list[Any]) -> Iterator[None]:
        for parameter in parameters:
            state.gathered.append(parameter.ds_id)
            parameter.data = state.whole[parameter.ds_id]
        yield
        for parameter in parameters:
            parameter.data = torch.empty(0)

    module = SimpleNamespace(zero=SimpleNamespace(GatheredParameters=gather))
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: state.rank)
    state.rank = 0
    return state


def plugged() -> TinyEncoder:
    model = TinyEncoder()
    gfsa.plug(model)
    for filter in gfsa.filters_of(model).values():
        nn.init.normal_(filter.theta)
    return model


def test_filters_are_gathered_to_be_saved(zero: Any, tmp_path: Path) -> None:
    model = plugged()
    expected = {n: f.coefficients() for n, f in gfsa.filters_of(model).items()}
    zero.whole = partition(model)
    assert all(f.theta.numel() == 0 for f in gfsa.filters_of(model).values())
    gfsa.save(model, tmp_path / "filters")
    # only the filters: gathering the model may not fit into memory
    assert len(zero.gathered) == len(expected)
    other = TinyEncoder()
    gfsa.load(other, tmp_path / "filters")
    for name, filter in gfsa.filters_of(other).items():
        assert torch.equal(filter.coefficients(), expected[name])


def test_only_the_first_process_writes(zero: Any, tmp_path: Path) -> None:
    model = plugged()
    zero.whole = partition(model)
    zero.rank = 1
    gfsa.save(model, tmp_path / "filters")
    assert zero.gathered
    assert not (tmp_path / "filters").exists()


def test_what_needs_whole_filters_is_refused(zero: Any, tmp_path: Path) -> None:
    model = plugged()
    gfsa.save(model, tmp_path / "filters")
    zero.whole = partition(model)
    assert plugged_sites(model)
    with pytest.raises(ValueError, match=r"sharded over processes; load .*deepspeed\.initialize"):
        gfsa.load(model, tmp_path / "filters")
