"""Parameters are not added to a model that is distributed over processes already."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gfsa
from support.tiny import TinyEncoder

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ddp_inside(model: nn.Module) -> nn.Module:
    return nn.ModuleDict({"wrapped": DistributedDataParallel(model)})


def sharded_blocks(model: TinyEncoder) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    return model


def sharded_attention(model: TinyEncoder) -> nn.Module:
    """A part of a sharded model: no module of it is a wrapper."""
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model.blocks[0].attention


def tensor_parallel(model: TinyEncoder) -> nn.Module:
    for block in model.blocks:
        parallelize_module(
            block, init_device_mesh("cpu", (1,)), {"attention.qkv": ColwiseParallel()}
        )
    return model


WRAPPED: dict[str, Callable[[TinyEncoder], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "one inside": ddp_inside,
    "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu")
    ),
    "fully_shard": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
    "replicate": replicate,
    "sharded blocks": sharded_blocks,
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
    "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    ),
    "replicate": lambda model: replicate(nn.Sequential(model)),
}


@pytest.mark.parametrize("how", AROUND)
def test_the_model_inside_of_a_wrapper_is_refused_while_the_wrapper_exists(how: str) -> None:
    model = TinyEncoder()
    wrapper = AROUND[how](model)
    for part in (model, model.blocks[0]):
        with pytest.raises(ValueError, match=f"part of a model that is wrapped by {how} already"):
            gfsa.plug(part)
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


@pytest.mark.parametrize("inside", [False, True])
def test_prune_first_then_wrap(inside: bool) -> None:
    model = prunable()
    parameters = list(model.parameters())
    wrapper = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"gfsa\.prune it, and wrap it afterwards"):
        gfsa.prune(model if inside else wrapper)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_a_distributed_model_is_not_given_its_old_filters_back() -> None:
    model = prunable()
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


@pytest.mark.parametrize("method", ["layerscale", "featscale"])
def test_comparison_methods_with_parameters_come_first(method: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 16, batch_first=True)
    model = DistributedDataParallel(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match="Plug first, then wrap"):
        gfsa.baselines.apply(model, method)
    assert list(model.state_dict()) == keys


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
