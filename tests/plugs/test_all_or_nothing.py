"""Plugging, unplugging, loading and pruning that fail anywhere leave the model as it was."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gfsa
from gfsa.plugs import FilterNotCalledError, SwapClass, register_adapter, registry
from support.interrupting import interrupted_everywhere
from support.tiny import FilteredTinyAttention, TinyAttention, TinyEncoder, UnknownAttention
from support.zoo import ZOO

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "class": lambda: TinyEncoder(depth=2),
    "torch": encoder,
    "interface": lambda: ZOO["bert"].model("sdpa"),
    "traced": lambda: nn.Sequential(UnknownAttention(16, 4), UnknownAttention(16, 4)),
}


# the files that change a model
CHANGING = ["plugs/install.py", "plugs/adapter.py", "plugs/checks/called.py", "adapters/"]


def state_of(model: nn.Module) -> dict[str, Any]:
    """Whatever plugging could change: by identity, so that an equal copy would be noticed."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = type(module)
        for key, value in vars(module).items():
            is_container = isinstance(value, (dict, set))
            found[f"{name}:{key}"] = list(value) if is_container else id(value)
            if isinstance(value, dict):
                found[f"{name}:{key}:values"] = [id(inner) for inner in value.values()]
    for name, tensor in model.state_dict().items():
        found[f"{name}=values"] = tensor.tolist()
    return found


def plug(model: nn.Module) -> None:
    gfsa.plug(model, K=3, w0=0.2, wK=0.3, unknown="trace")


@pytest.mark.parametrize("name", MODELS)
def test_an_interrupted_plug(name: str) -> None:
    model = MODELS[name]()
    before = state_of(model)

    def check(finished: bool) -> None:
        if gfsa.filters_of(model):
            # the interrupt came after the last change
            assert finished
            gfsa.unplug(model)
        assert state_of(model) == before

    interrupted_everywhere(lambda: plug(model), check, inside=CHANGING)


@pytest.mark.parametrize("name", MODELS)
def test_an_interrupted_unplug(name: str) -> None:
    model = MODELS[name]()
    plain = state_of(model)
    plug(model)
    before = state_of(model)

    def check(finished: bool) -> None:
        nonlocal before
        if gfsa.filters_of(model):
            assert state_of(model) == before
        else:
            assert state_of(model) == plain
            plug(model)
            before = state_of(model)

    interrupted_everywhere(lambda: gfsa.unplug(model), check, inside=CHANGING)


@pytest.mark.parametrize("plugged", [False, True], ids=["plain", "plugged"])
def test_an_interrupted_load(plugged: bool, tmp_path: Path) -> None:
    other = TinyEncoder(depth=3)
    gfsa.plug(other, w0=0.2, dropout_after="filter")
    gfsa.save(other, tmp_path)
    model = TinyEncoder(depth=3)
    if plugged:
        gfsa.plug(model)
    start = copy.deepcopy(model.state_dict())
    before = state_of(model)
    thetas = [f.theta.tolist() for f in gfsa.filters_of(other).values()]

    def check(finished: bool) -> None:
        nonlocal before
        found = gfsa.filters_of(model)
        if found and [f.theta.tolist() for f in found.values()] == thetas:
            assert {f.dropout_after for f in found.values()} == {"filter"}
            if plugged:
                model.load_state_dict(start)
                before = state_of(model)
            else:
                gfsa.unplug(model)
        assert state_of(model) == before

    loading = ["plugs/saving/checkpoint.py", "filters/spec.py", "plugs/install.py"]
    interrupted_everywhere(lambda: gfsa.load(model, tmp_path), check, inside=loading)


def test_an_interrupted_prune() -> None:
    model = TinyEncoder(depth=3)
    gfsa.plug(model)
    before = state_of(model)
    reports: list[Any] = []

    def check(finished: bool) -> None:
        nonlocal before
        if state_of(model) != before:
            assert finished or not gfsa.filters_of(model)
            for filter in gfsa.filters_of(model).values():
                assert filter.degree < 2
            gfsa.plug(model)
            before = state_of(model)

    interrupted_everywhere(
        lambda: reports.append(gfsa.prune(model)), check, inside=["plugs/prune.py"]
    )


class Failing(SwapClass):
    """An adapter that fails in the middle of the second layer."""

    def __init__(self, where: str) -> None:
        super().__init__(FilteredTinyAttention, lambda module: module.heads)
        self.where = where
        self.count = 0

    def install(self, module: nn.Module) -> None:
        self.count += 1
        module.note = "half installed"
        module.register_forward_hook(lambda *args: None)
        if self.where == "install" and self.count == 2:
            raise RuntimeError("no")
        super().install(module)

    def remove(self, module: nn.Module) -> None:
        self.count -= 1
        super().remove(module)
        if self.where == "remove" and self.count == 0:
            raise RuntimeError("no")

    def on_filters_changed(self, model: nn.Module) -> None:
        if self.where == "mark":
            raise RuntimeError("no")


@pytest.mark.parametrize("where", ["install", "mark", "remove"])
def test_an_adapter_that_fails(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register_adapter(TinyAttention, Failing(where))
    model = TinyEncoder(depth=3).eval()
    change = gfsa.plug
    if where == "remove":
        gfsa.plug(model, w0=0.3)
        change = gfsa.unplug
    expected, before = model(X), state_of(model)
    with pytest.raises(RuntimeError, match="no"):
        change(model)
    assert state_of(model) == before
    assert torch.equal(model(X), expected)
    if where != "remove":
        register_adapter(TinyAttention, SwapClass(FilteredTinyAttention, "heads"))
        gfsa.plug(model)
        gfsa.unplug(model)
        assert state_of(model) == before


def test_the_check_for_uncalled_filters_survives_a_failed_unplug() -> None:
    model = TinyEncoder(depth=2).eval()
    gfsa.plug(model)
    silent = model.blocks[1].attention

    def check(finished: bool) -> None:
        if not gfsa.filters_of(model):
            gfsa.plug(model)
        silent.forward = lambda x, mask=None: x
        with pytest.raises(FilterNotCalledError, match=r"blocks\.1\.attention"):
            model(X)
        del silent.forward
        # only what the check needs to know next time is left
        gfsa.unplug(model)
        gfsa.plug(model)

    interrupted_everywhere(
        lambda: gfsa.unplug(model), check, inside=["plugs/install.py", "called.py"]
    )


def test_threads_that_plug_and_unplug_one_model_leave_it_whole() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 6).eval()
    x = torch.randn(1, 3, 8)
    before, keys = model(x), list(model.state_dict())

    def change(_: int) -> None:
        for _ in range(15):
            for action in (gfsa.plug, gfsa.unplug):
                # the other thread may have done it
                with contextlib.suppress(ValueError):
                    action(model)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(change, range(4)))
    finally:
        sys.setswitchinterval(interval)
    if gfsa.filters_of(model):
        assert len(gfsa.filters_of(model)) == 6
        gfsa.unplug(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), before)
    gfsa.plug(model)
    torch.testing.assert_close(model(x), before)
