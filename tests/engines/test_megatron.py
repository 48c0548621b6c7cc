"""Megatron-core: filters by a specification, with grouped keys, tensor parallel and not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines import megatron_worker as worker
from engines.shared import torchrun
from gfsa.engines.megatron import with_filters


@pytest.fixture(scope="module")
def process() -> Any:
    """This process is a group of its own."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    worker.start()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What the processes saw, by how many there were."""
    folder = tmp_path_factory.mktemp("megatron")
    for processes in (1, 2):
        torchrun(processes, "-m", "engines.megatron_worker", str(folder))
    return {
        world: [torch.load(folder / f"{world}-{rank}.pt") for rank in range(world)]
        for world in (1, 2)
    }


KINDS = ["2 groups", "4 groups"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_filter_changes_nothing(kind: str, seen: dict[int, Any]) -> None:
    for ranks in seen.values():
        assert all(rank[kind]["fresh"] for rank in ranks)
        assert all(len(rank[kind]["missing"]) == 2 * worker.LAYERS for rank in ranks)
        assert not torch.allclose(ranks[0][kind]["logits"], ranks[0][kind]["plain"], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel_is_the_same(kind: str, seen: dict[int, Any]) -> None:
    (alone,), two = ([rank[kind] for rank in seen[world]] for world in (1, 2))
    for rank in two:
        torch.testing.assert_close(rank["logits"], alone["logits"], atol=1e-5, rtol=1e-4)
    for layer in range(worker.LAYERS):
        gathered = torch.cat([rank["gradients"][layer] for rank in two])
        assert gathered.abs().min() > 0
        torch.testing.assert_close(gathered, alone["gradients"][layer], atol=1e-6, rtol=1e-3)


def test_checkpoints_shard_the_filters_by_heads(seen: dict[int, Any]) -> None:
    for number, rank in enumerate(seen[2]):
        for shape, offset in rank["2 groups"]["sharded"].values():
            # layers are stacked in a checkpoint of Megatron's
            assert shape[-2:] == (worker.HEADS, 3)
            assert offset[-2:] == (number * worker.HEADS // 2, 0)
        assert len(rank["2 groups"]["sharded"]) == worker.LAYERS
        assert len(rank["2 groups"]["described"]) == worker.LAYERS


@pytest.mark.parametrize("groups", [2, worker.HEADS])
def test_it_is_the_formula(groups: int, process: Any) -> None:
    spec = worker.get_gpt_layer_local_spec()
    model = worker.gpt(with_filters(spec, filter="Polynomial", degree=3), groups)
    core = model.decoder.layers[0].self_attention.core_attention
    nn.init.normal_(core.gfsa.theta)
    torch.manual_seed(1)
    shape = (worker.LENGTH, 2)
    q = torch.randn(*shape, worker.HEADS, 8)
    k, v = torch.randn(2, *shape, groups, 8)
    _, _, mask = worker.inputs()
    got = core(q, k, v, mask)

    def heads_first(x: Tensor) -> Tensor:
        return x.repeat_interleave(worker.HEADS // x.shape[2], dim=2).permute(1, 2, 0, 3)

    q, k, v = (heads_first(x).double() for x in (q, k, v))
    scores = (q @ k.mT / 8**0.5).masked_fill(mask, float("-inf"))
    a, power, expected = scores.softmax(-1), v, torch.zeros_like(v)
    for c in core.gfsa.coefficients().detach().double().unbind(-1):
        expected = expected + c[:, None, None] * power
        power = a @ power
    expected = expected.permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-4)


def test_the_optimiser_can_name_the_filters(process: Any) -> None:
    from megatron.core.optimizer import (
        OptimizerConfig,
        ParamKey,
        _get_param_groups,
        get_standard_config_overrides,
    )

    model = worker.gpt(with_filters(worker.get_gpt_layer_local_spec()))
    config = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1)
    overrides = get_standard_config_overrides(config)
    overrides[ParamKey(name="*.gfsa.theta")] = {"max_lr": 1e-2, "wd_mult": 0.0}
    groups = _get_param_groups([model], config, overrides)
    of_filters = {id(filter.theta) for filter in worker.filters(model)}
    (own,) = [g for g in groups if of_filters & {id(p) for p in g["params"]}]
    assert {id(p) for p in own["params"]} == of_filters
    assert (own["max_lr"], own["wd_mult"]) == (1e-2, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 would drop different entries"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable' is not supported"),
    ],
)
def test_maps_that_differ_from_pass_to_pass_are_refused(
    changes: dict[str, Any], message: str, process: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        worker.gpt(with_filters(worker.get_gpt_layer_local_spec()), **changes)


def test_cached_keys_are_refused(process: Any) -> None:
    model = worker.gpt(with_filters(worker.get_gpt_layer_local_spec()), worker.HEADS)
    core = model.decoder.layers[0].self_attention.core_attention
    q, k = torch.randn(1, 2, worker.HEADS, 8), torch.randn(5, 2, worker.HEADS, 8)
    with pytest.raises(NotImplementedError, match="5 keys for 1 queries"):
        core(q, k, k, None)


def test_wrong_specifications_are_refused() -> None:
    with pytest.raises(ValueError, match="filter must be one of"):
        with_filters(worker.get_gpt_layer_local_spec(), filter="Cubic")
    with pytest.raises(ValueError, match=r"layers with self_attention\.core_attention"):
        with_filters(worker.get_gpt_layer_local_spec().submodules.mlp)


def test_what_a_step_costs(process: Any, costs: Any) -> None:
    spec = worker.get_gpt_layer_local_spec()
    wide = {"hidden_size": 128, "length": 256}
    filtered, plain = worker.gpt(with_filters(spec, K=3), **wide), worker.gpt(spec, **wide)
    inputs = worker.inputs(256)

    def step(model: Any) -> None:
        model(*inputs).logsumexp(-1).mean().backward()
        model.zero_grad()

    costs(step, filtered, plain)
