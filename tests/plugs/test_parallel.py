"""Filters in models that are wrapped, sharded, partitioned or offloaded."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gfsa
from support.tiny import TinyEncoder
from support.zoo import ZOO

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def sharded_attention(model: TinyEncoder) -> nn.Module:
    """A part of a sharded model: no module of it is a wrapper."""
    return sharded(model).blocks[0].attention


def tensor_parallel(model: TinyEncoder) -> nn.Module:
    plan = {"blocks.*.attention.qkv": ColwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (1,)), plan)


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


WRAPPED: dict[str, Callable[[TinyEncoder], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "one inside": lambda model: nn.ModuleDict({"wrapped": DistributedDataParallel(model)}),
    "FullyShardedDataParallel": fsdp1,
    "fully_shard": sharded,
    "replicate": replicate,
    "a part of a sharded model": sharded_attention,
    "tensor parallel": tensor_parallel,
}


@pytest.mark.parametrize("how", WRAPPED)
def test_plug_first_then_wrap(how: str, tmp_path: Path) -> None:
    saved = TinyEncoder()
    gfsa.plug(saved)
    gfsa.save(saved, tmp_path / "filters")
    gfsa.save(saved.blocks[0].attention, tmp_path / "part")
    model = WRAPPED[how](TinyEncoder())
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match="Plug first, then wrap"):
        gfsa.plug(model)
    # whose layers have other names or shapes, and are refused for that
    if how not in ("one inside", "FullyShardedDataParallel"):
        with pytest.raises(ValueError, match="Plug first, then wrap"):
            gfsa.load(model, tmp_path / ("part" if "part" in how else "filters"))
    with pytest.raises(ValueError, match="Plug first, then wrap"):
        gfsa.baselines.apply(model, "attnscale")
    assert list(model.state_dict()) == keys
    assert not gfsa.filters_of(model)


AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": lambda model: fsdp1(model, use_orig_params=True),
    "replicate": lambda model: replicate(nn.Sequential(model)),
}


@pytest.mark.parametrize("how", AROUND)
def test_the_model_inside_of_a_wrapper_is_refused_while_the_wrapper_exists(how: str) -> None:
    model = TinyEncoder()
    wrapper = AROUND[how](model)
    for part in (model, model.blocks[0]):
        with pytest.raises(ValueError, match=f"part of a model that is wrapped by {how} already"):
            gfsa.plug(part)
    # beside a filter without parameters, too, a depth term has some
    with pytest.raises(ValueError, match=f"wrapped by {how} already"):
        gfsa.plug(model, filter=gfsa.Twicing, depth=True)
    wrapper(X)
    with pytest.raises(ValueError, match=f"wrapped by {how} already"):
        gfsa.plug(model)
    del wrapper
    gc.collect()
    # FullyShardedDataParallel leaves views of its own parameter in the model
    if how != "FullyShardedDataParallel":
        gfsa.plug(model)


def prunable() -> TinyEncoder:
    """Two heads of a layer need their second pass: pruning makes new parameters."""
    model = TinyEncoder()
    gfsa.plug(model, w0=0.3)
    with torch.no_grad():
        for filter in gfsa.filters_of(model).values():
            filter.theta[:2, 2] = 0.5
    return model


def test_prune_first_then_wrap() -> None:
    model = prunable()
    parameters = list(model.parameters())
    wrapper = DistributedDataParallel(model)
    for part in (model, wrapper):
        with pytest.raises(ValueError, match=r"gfsa\.prune it, and wrap it afterwards"):
            gfsa.prune(part)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    del part, wrapper
    gc.collect()
    report = gfsa.prune(model)
    pruned = list(model.parameters())
    wrapper = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="Plug first, then wrap"):
        report.undo()
    assert all(a is b for a, b in zip(model.parameters(), pruned, strict=True))
    del wrapper
    gc.collect()
    report.undo()
    assert all(type(filter) is gfsa.GFSA for filter in gfsa.filters_of(model).values())


def test_plugged_models_are_wrapped_and_loaded_into(tmp_path: Path) -> None:
    model = TinyEncoder()
    gfsa.plug(model, w0=0.3)
    expected = model(X)
    gfsa.save(model, tmp_path / "filters")
    with torch.no_grad():
        for filter in gfsa.filters_of(model).values():
            filter.theta.zero_()
    wrapper = DistributedDataParallel(model)
    gfsa.load(wrapper, tmp_path / "filters")
    assert torch.equal(wrapper(X), expected)
    wrapper(X).sum().backward()
    assert all(f.theta.grad is not None for f in gfsa.filters_of(wrapper).values())


def test_wrappers_of_one_process_are_accepted() -> None:
    expected = TinyEncoder()
    gfsa.plug(expected, w0=0.3)
    for wrap in (nn.DataParallel, lambda model: torch.compile(model, backend="eager")):
        model = TinyEncoder()
        wrapped = wrap(model)
        wrapped(X)
        gfsa.plug(wrapped, w0=0.3)
        model.load_state_dict(expected.state_dict())
        torch.testing.assert_close(wrapped(X), expected(X))
        assert len(gfsa.filters_of(wrapped)) == 3


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


def test_filters_are_gathered_to_be_saved_and_not_loaded_into(zero: Any, tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match=r"sharded over processes; load .*deepspeed\.initialize"):
        gfsa.load(model, tmp_path / "filters")


def test_only_the_first_process_writes(zero: Any, tmp_path: Path) -> None:
    model = plugged()
    zero.whole = partition(model)
    zero.rank = 1
    gfsa.save(model, tmp_path / "filters")
    assert zero.gathered
    assert not (tmp_path / "filters").exists()


BATCH = ZOO["bert"].batch()
OFFLOADS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "cpu": lambda model, folder: accelerate.cpu_offload(model),
    "disk": lambda model, folder: accelerate.disk_offload(
        model, str(folder / "offload"), execution_device="cpu"
    ),
    "dispatch": lambda model, folder: accelerate.dispatch_model(
        model, {"": "cpu"}, main_device="cpu", force_hooks=True
    ),
}


def bert() -> nn.Module:
    return ZOO["bert"].model("sdpa")


@torch.no_grad()
def output(model: nn.Module) -> Tensor:
    return model(**BATCH)[0]


def plug(model: nn.Module) -> None:
    gfsa.plug(model, w0=0.2, wK=0.1)


@pytest.mark.parametrize("where", OFFLOADS)
@pytest.mark.parametrize("first", ["offload", "plug"])
def test_offloaded_models_compute_the_same(first: str, where: str, tmp_path: Path) -> None:
    model = bert()
    reference = copy.deepcopy(model)
    plug(reference)
    expected = output(reference)
    assert not torch.equal(expected, output(bert()))
    if first == "plug":
        plug(model)
    OFFLOADS[where](model, tmp_path)
    if first == "offload":
        plug(model)
        assert not any(filter.theta.is_meta for filter in gfsa.filters_of(model).values())
    assert torch.equal(output(model), expected)


def test_filters_of_an_offloaded_model_are_saved_and_loaded(tmp_path: Path) -> None:
    model = bert()
    accelerate.cpu_offload(model)
    plug(model)
    gfsa.save(model, tmp_path)
    expected = output(model)
    gfsa.unplug(model)
    gfsa.load(model, tmp_path)
    assert torch.equal(output(model), expected)
    # not if accelerate has offloaded the filters
    remove_hook_from_module(model, recurse=True)
    before = (tmp_path / "filters.safetensors").read_bytes()
    accelerate.cpu_offload(model)
    with pytest.raises(ValueError, match="is on the meta device and has no values to save"):
        gfsa.save(model, tmp_path)
    assert (tmp_path / "filters.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="is on the meta device, where the numbers"):
        gfsa.load(model, tmp_path)
    assert torch.equal(output(model), expected)
    with torch.device("meta"):
        empty = bert()
    with pytest.raises(ValueError, match="is on the meta device, where the numbers"):
        gfsa.load(empty, tmp_path)
    assert not gfsa.filters_of(empty)


def test_a_forward_that_a_class_cannot_replace_is_refused() -> None:
    """accelerate sets the forward of an instance; the layer would compute plain attention."""
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    accelerate.cpu_offload(model)
    with pytest.raises(ValueError, match=r"has a forward of its own.*plug first, then offload"):
        gfsa.plug(model)
    assert not gfsa.filters_of(model)


def test_a_block_that_is_offloaded_as_a_whole_is_refused() -> None:
    model = bert()
    accelerate.cpu_offload(model, preload_module_classes=["BertLayer"])
    with pytest.raises(ValueError, match=r"offloads the block around .*layer\.0.*as a whole"):
        gfsa.plug(model)
    assert not gfsa.filters_of(model)
    output(model)


def test_a_filter_that_a_wrapper_still_calls_is_not_removed() -> None:
    model = TinyEncoder().eval()
    x = torch.randn(2, 5, 16)
    plain = model(x)
    gfsa.plug(model, w0=0.3)
    filtered = model(x)
    accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    attention = model.blocks[0].attention
    accelerate.hooks.add_hook_to_module(attention, accelerate.hooks.ModelHook())
    for remove in (gfsa.unplug, lambda model: gfsa.prune(model, tolerance=9.0)):
        with pytest.raises(ValueError, match=r"forward of blocks\.0\.attention was wrapped"):
            remove(model)
        assert torch.equal(model(x), filtered)
    remove_hook_from_module(model, recurse=True)
    gfsa.unplug(model)
    assert torch.equal(model(x), plain)
