"""Layers of a cache that hold powers: they grow in place, and only where nobody can notice."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer, StaticSlidingWindowLayer

from gfsa.adapters.transformers import cache
from gfsa.adapters.transformers.cache import (
    GrowingPowers,
    LayerPast,
    StaticPowers,
    TracedStaticPowers,
    empty_like,
)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, count, 4, generator=torch.Generator().manual_seed(seed))


def filled(count: int) -> GrowingPowers:
    companion = empty_like(DynamicLayer())
    with torch.no_grad():
        companion.add(tokens(count), None)
    assert type(companion) is GrowingPowers
    return companion


@torch.no_grad()
def test_only_its_rows_are_kept() -> None:
    """Of the tokens that were appended first, nothing is: they are those of the whole prompt."""
    companion, first = empty_like(DynamicLayer()), tokens(40)
    companion.add(first, None)
    held = [x.untyped_storage() for x in vars(companion).values() if isinstance(x, Tensor)]
    assert first.untyped_storage().data_ptr() not in {storage.data_ptr() for storage in held}
    assert sum(storage.nbytes() for storage in held) <= 24 * 4 * (40 + 16)


@torch.no_grad()
@pytest.mark.parametrize("left", [-3, 6])
def test_cropped_tokens_are_written_again(left: int) -> None:
    """By a negative number of tokens to remove, or, until 5.17, by the length that is left."""
    if left > 0:
        try:
            DynamicLayer().crop(left)
        except ValueError as error:
            pytest.skip(f"this transformers: {error}")
    companion = filled(9)
    place = companion.keys.data_ptr()
    companion.crop(left)
    assert torch.equal(companion.keys, tokens(9)[:, :, :6])
    other = tokens(2, seed=1)
    found = companion.add(other, None)
    assert torch.equal(found, torch.cat([tokens(9)[:, :, :6], other], 2))
    assert found.data_ptr() == place
    companion.crop(-20)
    assert companion.get_seq_length() == 0


@torch.no_grad()
@pytest.mark.parametrize("seed", range(8))
def test_rows_are_those_of_a_concatenation_whatever_happens(seed: int) -> None:
    """Beams, selected rows and copies have memory of their own."""
    companion, expected = filled(5), tokens(5)
    copies: list[tuple[GrowingPowers, Tensor]] = []
    steps = Random(seed)
    for number in range(40):
        new, order = tokens(steps.randint(1, 3), seed=number), torch.tensor([1, 0])
        match steps.choice(["add", "room", "room", "reorder", "select", "crop", "copy"]):
            case "add":
                found = companion.add(new, None)
                expected = torch.cat([expected, new], 2)
                assert torch.equal(found, expected)
            case "room":
                length, new = expected.shape[2], new[:, :, :1]
                companion.make_room(new, None)[:, :, length : length + 1] = new
                expected = torch.cat([expected, new], 2)
            case "reorder":
                companion.reorder_cache(order)
                expected = expected[order]
            case "select":
                companion.batch_select_indices(order[:1])
                companion.batch_repeat_interleave(2)
                expected = expected[[1, 1]]
            case "crop":
                companion.crop(-2)
                expected = expected[:, :, :-2]
            case "copy":
                copies.append((companion, expected))
                companion = copy.deepcopy(companion)
        assert companion.get_seq_length() == expected.shape[2]
        for held, rows in (*copies, (companion, expected)):
            assert torch.equal(held.keys, rows)


@pytest.mark.parametrize("how", ["after a crop", "before a crop", "by a kernel"])
def test_recorded_tokens_are_not_overwritten(how: str) -> None:
    """The recorded rows have room for the next token, which belongs elsewhere."""
    companion = filled(5)
    new = tokens(1, seed=1).requires_grad_()
    found = companion.add(new, None)
    loss, before = found.square().sum(), found.detach().clone()
    with torch.no_grad():
        # would raise in backward if it were written where the recorded tokens are
        if how == "before a crop":
            companion.add(tokens(1, seed=2), None)
        companion.crop(-2)
        if how == "by a kernel":
            # a kernel's write is nothing that autograd would notice
            companion.make_room(tokens(1), None).detach()[:, :, 4] = 7.0
        else:
            companion.add(tokens(1, seed=3), None)
    assert torch.equal(found, before)
    loss.backward()
    assert torch.equal(new.grad, 2 * new)


@torch.no_grad()
def test_memory_of_cropped_tokens_is_given_back() -> None:
    companion = filled(400)
    companion.crop(-390)
    found = companion.add(tokens(1, seed=1), None)
    assert torch.equal(found, torch.cat([tokens(400)[:, :, :10], tokens(1, seed=1)], 2))
    assert found.untyped_storage().nbytes() <= 24 * 4 * (11 + 16)


def test_rows_of_inference_mode_can_be_left() -> None:
    companion = empty_like(DynamicLayer())
    with torch.inference_mode():
        companion.add(tokens(5), None)
    with torch.no_grad():
        found = companion.add(tokens(1, seed=1), None)
    assert torch.equal(found, torch.cat([tokens(5), tokens(1, seed=1)], 2))


def static_layer(window: int | None) -> Any:
    if window is None:
        return StaticLayer(max_cache_len=11)
    return StaticSlidingWindowLayer(max_cache_len=10, sliding_window=window)


@torch.no_grad()
@pytest.mark.parametrize("kind", [StaticPowers, TracedStaticPowers])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "counts",
    [(1,) * 8, (3, 1, 1, 1, 1), (4, 1, 1), (5, 1, 1), (9, 1), (2, 4, 1), (2, 2, 3, 1), (6, 5)],
    ids=str,
)
def test_a_static_layer_of_powers_is_one_of_transformers(
    counts: tuple[int, ...], window: int | None, kind: Any
) -> None:
    """Rows as a layer of keys and values has them, and what an update returns."""
    layer = static_layer(window)
    companion = empty_like(layer)
    assert type(companion) is StaticPowers
    companion = kind(companion.max_cache_len, slides=companion.slides)
    for turn in range(2):
        for seed, count in enumerate(counts, 10 * turn):
            new = tokens(count, seed=seed)
            _, values = layer.update(new, new)
            assert torch.equal(companion.add(new, layer), values)
            assert torch.equal(companion.keys, layer.values)
        beams = torch.tensor([1, 0])
        layer.reorder_cache(beams)
        companion.reorder_cache(beams)
        assert torch.equal(companion.keys, layer.values)
        layer.reset()
        companion.reset()


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 4])
def test_room_in_a_static_layer_that_a_kernel_writes(window: int | None) -> None:
    layer = static_layer(window)
    companion = empty_like(layer)
    first = tokens(2)
    layer.update(first, first)
    companion.add(first, layer)
    for length in range(3, 9):
        new = tokens(1, seed=length)
        layer.update(new, new)
        rows = companion.make_room(new, layer)
        assert rows is companion.keys
        newest = min(length, layer.max_cache_len)
        rows[:, :, newest - 1 : newest] = new
        assert torch.equal(rows, layer.values)


def test_counters_of_a_static_layer_without_powers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each static layer has its own, made where a graph neither is traced nor captured."""
    gpu, layer = torch.device("cuda:0"), StaticLayer(8)
    dynamic, window = DynamicLayer(), StaticSlidingWindowLayer(8, 4)
    does: set[str] = set()
    monkeypatch.setattr(cache, "_new_counters", lambda heads, device: OnGPU(heads))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: "capture" in does)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: "trace" in does)
    for what in ("capture", "trace"):
        does.add(what)
        assert LayerPast(layer, 0, 1).counters(6, gpu) is None
        does.clear()
    assert LayerPast(dynamic, 0, 1).counters(6, gpu) is None
    assert not hasattr(layer, "gfsa_counters")
    made: Any = LayerPast(layer, 0, 1).counters(6, gpu)
    assert made.heads == 6
    # those that are there serve a captured and a compiled step, and fewer sequences
    for what in ("capture", "trace"):
        does.add(what)
        kept = LayerPast(layer, 0, 1)
        assert kept.counters(6, gpu) is kept.counters(4, gpu) is made
        does.clear()
    more: Any = LayerPast(layer, 0, 1).counters(12, gpu)
    assert more.heads == 12
    assert LayerPast(layer, 0, 1).counters(6, gpu) is more is layer.gfsa_counters
    assert LayerPast(window, 0, 1).counters(6, gpu) is not more


class OnGPU:
    """Counters, as far as they are asked."""

    device = torch.device("cuda:0")

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def __len__(self) -> int:
        return self.heads


def test_new_counters_are_zeros_with_one_address() -> None:
    counters: Any = cache._new_counters(6, "cpu")
    assert counters.dtype == torch.int32
    assert counters.tolist() == [0] * 6
    # a compiled graph may keep the address
    assert hasattr(counters, "_dynamo_static_input_type")
