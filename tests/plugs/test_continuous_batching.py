"""Continuous batching of plugged models: the tokens that ``generate`` gives, whatever happens.

More models, degrees and implementations are in ``tests/engines/transformers``.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.integrations import flash_paged

import gfsa
from gfsa.adapters.transformers import paged
from support.batching import (
    SECTORS,
    by_batching,
    by_generate,
    bytes_of,
    decoder,
    greedy,
    prompts,
)

hf.logging.set_verbosity_error()
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

LENGTHS = (5, 11, 17)
MIXED = "gemma 3, both kinds of layers"
GROUPED = "llama, grouped queries"
# blocks that do not hold three requests of 31 tokens at a time
FEW = {GROUPED: 14, MIXED: 10 if SECTORS else 20}


def settings(**arguments: Any) -> Any:
    return hf.ContinuousBatchingConfig(
        **{"num_blocks": 80, "block_size": 4, "max_batch_tokens": 64, **arguments}
    )


@pytest.fixture(scope="module")
def grouped() -> Any:
    return decoder(GROUPED)


@pytest.mark.parametrize(("name", "new"), [(GROUPED, 40), (MIXED, 20)])
def test_the_tokens_are_those_of_generate(name: str, new: int) -> None:
    model = decoder(name)
    inputs = prompts(*LENGTHS)
    expected = by_generate(model, inputs, new)
    # 8 tokens a batch: prompts come in pieces, beside requests that decode already
    for most in (64, 8):
        assert by_batching(model, inputs, new, max_batch_tokens=most) == expected
    assert model.config._attn_implementation == "sdpa"
    gfsa.unplug(model)
    # the filters change the tokens, so that a filter that is left out would be seen
    assert by_generate(model, inputs[:1], new) != expected[:1]


@pytest.mark.parametrize("name", [GROUPED, pytest.param(MIXED, marks=pytest.mark.slow)])
def test_forked_requests_take_the_powers_with_them(name: str) -> None:
    model = decoder(name)
    inputs = prompts(8)
    expected = by_generate(model, inputs, new=12)[0]
    generation = greedy(12)
    # set later: a configuration alone refuses copies of a greedy sequence
    generation.num_return_sequences = 3
    with model.continuous_batching_context_manager(
        generation, continuous_batching_config=settings(allow_block_sharing=False)
    ) as manager:
        manager.add_requests(inputs)
        results = [manager.get_result(timeout=30) for _ in range(3)]
    assert [result.generated_tokens for result in results] == [expected] * 3
    assert sorted(result.request_id for result in results) == [
        "req_0",
        "req_0__child#0",
        "req_0__child#1",
    ]


def test_requests_with_one_prefix_share_its_powers(
    grouped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = paged_cache.PagedAttentionCache.search_prefix_match
    shared = []

    def counted(self: Any, *args: Any) -> int:
        shared.append(search(self, *args))
        return shared[-1]

    monkeypatch.setattr(paged_cache.PagedAttentionCache, "search_prefix_match", counted)
    (prefix,) = prompts(13)
    inputs = [prefix + tail for tail in prompts(2, 5, seed=4)]
    expected = by_generate(grouped, inputs, new=12)
    with grouped.continuous_batching_context_manager(
        greedy(12), continuous_batching_config=settings()
    ) as manager:
        found = []
        for ids in inputs:
            manager.add_request(ids, eos_token_id=-1)
            found.append(manager.get_result(timeout=30).generated_tokens)
    assert found == expected
    assert shared == [0, 12]


@pytest.mark.parametrize("name", [GROUPED, pytest.param(MIXED, marks=pytest.mark.slow)])
def test_requests_that_wait_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(name)
    inputs = prompts(5, 11, 3)
    expected = by_generate(model, inputs, new=20)
    empty, offload = torch.empty, OffloadingManager._offload_to_cpu
    moved: set[str] = set()

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        # memory is pinned for a GPU, and there may be none
        return empty(*args, **kwargs)

    def counted(self: Any, *victims: Any) -> set[str]:
        requests = offload(self, *victims)
        moved.update(requests)
        return requests

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(OffloadingManager, "_offload_to_cpu", counted)
    few = {"num_blocks": FEW[name], "allow_block_sharing": False}
    assert by_batching(model, inputs, new=20, **few, cpu_offload_space=1e-3) == expected
    assert moved


@pytest.mark.parametrize("space", [None, 1e6])
def test_the_powers_take_their_share_of_the_offloading_memory_once(
    space: float | None, grouped: Any
) -> None:
    given = settings(cpu_offload_space=space)
    manager = grouped.init_continuous_batching(greedy(), given)
    grouped.set_attn_implementation("sdpa")
    # keys and values have 2 heads each, the powers 4. The threshold limits a space that is larger
    # than the memory, too
    found = manager.continuous_batching_config
    assert found.cpu_offload_space_safety_threshold == 0.4
    assert found.cpu_offload_space == (None if space is None else space / 2)
    assert (given.cpu_offload_space, given.cpu_offload_space_safety_threshold) == (space, 0.8)


def test_requests_that_are_evicted_and_start_again(grouped: Any) -> None:
    inputs = prompts(5, 11, 3)
    found = by_batching(grouped, inputs, new=20, num_blocks=FEW[GROUPED])
    assert found == by_generate(grouped, inputs, new=20)


def test_the_powers_are_part_of_the_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 4_000_000
    monkeypatch.setattr(
        paged_cache, "get_device_and_memory_breakdown", lambda: (torch.device("cpu"), total, 0, 0)
    )
    model = decoder(GROUPED)

    def blocks_and_bytes() -> tuple[int, int]:
        manager = model.init_continuous_batching(
            greedy(), settings(num_blocks=None, max_batch_tokens=8, max_memory_percent=1.0)
        )
        cache = manager._create_batch_processor().cache
        manager.stop()
        return cache.num_blocks, bytes_of(cache)

    blocks, size = blocks_and_bytes()
    assert 0.4 * total < size < total
    gfsa.unplug(model)
    plain_blocks, plain_size = blocks_and_bytes()
    # keys and values have 2 heads each, the powers 4: a block is twice as large
    assert plain_size / plain_blocks == pytest.approx(size / blocks / 2, rel=0.01)
    # since 5.19 the keys and values of all tokens, repeated, are part of the budget, filters or not
    assert blocks < (0.75 if SECTORS else 0.6) * plain_blocks
    gfsa.plug(model)
    with pytest.raises(MemoryError):
        model.init_continuous_batching(
            greedy(), settings(num_blocks=plain_blocks, max_batch_tokens=8, max_memory_percent=1.0)
        )._create_batch_processor()


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, *_: Any, **options: Any
) -> Tensor:
    """What flash's kernel for sequences end to end computes, written out."""
    assert q.shape[1] % k.shape[1] == 0
    assert k.shape == v.shape
    window, out = options["window_size"][0], []
    for i in range(len(q_ends) - 1):
        a, b = (
            x[start:end].transpose(0, 1)
            for x, start, end in ((q, q_ends[i], q_ends[i + 1]), (k, k_ends[i], k_ends[i + 1]))
        )
        value = v[k_ends[i] : k_ends[i + 1]].transpose(0, 1)
        rows = torch.arange(a.shape[1])[:, None] + b.shape[1] - a.shape[1]
        columns = torch.arange(b.shape[1])
        seen = columns <= rows
        if window >= 0:
            seen &= columns >= rows - window
        out.append(
            F.scaled_dot_product_attention(
                a, b, value, attn_mask=seen, scale=options["softmax_scale"], enable_gqa=True
            )
        )
    return torch.cat(out, dim=1).transpose(0, 1)


def by_keywords(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The same kernel, with the arguments that transformers looks for in its signature."""
    assert causal
    return varlen_attention(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k), softmax_scale=softmax_scale, window_size=window_size
    )


@pytest.mark.parametrize("name", [MIXED, pytest.param(GROUPED, marks=pytest.mark.slow)])
def test_flash_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(name)
    inputs = prompts(*LENGTHS)
    expected = by_generate(model, inputs, new=12)
    if SECTORS:
        monkeypatch.setattr(flash, "_loaded_implementation", None)
        monkeypatch.setattr(
            flash, "_lazy_imports", lambda *_, **__: (None, by_keywords, None, None, None)
        )
        model.config._attn_implementation_internal = "flash_attention_2"
    else:
        monkeypatch.setattr(
            flash_paged, "lazy_import_paged_flash_attention", lambda name: (varlen_attention, None)
        )
        model.config._attn_implementation_internal = "paged|flash_attention_2"
    assert by_batching(model, inputs, new=12, max_batch_tokens=16) == expected


def test_the_decoding_kernel_of_flash_is_refused(grouped: Any) -> None:
    with pytest.raises(ValueError, match="max_blocks_per_request=8 asks for a decoding kernel"):
        grouped.generate_batch(
            [[5, 6]], continuous_batching_config=settings(max_blocks_per_request=8)
        )


def test_a_paged_implementation_without_a_paged_cache_is_refused() -> None:
    model = decoder(GROUPED)
    model.config._attn_implementation_internal = "paged|eager"
    with pytest.raises(ValueError, match=r"layers.0.self_attn .* without a paged cache"):
        model(torch.tensor([[5, 6, 7]]), attention_mask=torch.zeros(1, 1, 3, 3), use_cache=False)


def test_a_paged_cache_that_the_model_did_not_start_is_refused(grouped: Any) -> None:
    manager = type(grouped).init_continuous_batching(grouped, greedy(), settings())
    manager.start()
    manager.add_request([5, 6, 7], eos_token_id=-1)
    error = manager.get_result(timeout=30).error
    manager.stop()
    assert "no room for the powers of attention" in error


def test_a_model_plugged_by_tracing_is_refused() -> None:
    config = hf.GPTNeoConfig(
        vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
    )
    model = hf.GPTNeoForCausalLM(config)
    gfsa.plug(model)
    for start in (lambda: model.generate_batch([[5, 6]]), model.init_continuous_batching):
        with pytest.raises(NotImplementedError, match=r"is plugged by tracing.*Use generate\(\)"):
            start()


def test_another_transformers_is_refused(grouped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OffloadingManager, "_offload_to_cpu")
    with pytest.raises(NotImplementedError, match=r"has no OffloadingManager._offload_to_cpu"):
        grouped.generate_batch([[5, 6]])


def test_a_transformers_with_another_paged_cache_is_refused(
    grouped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, name = (
        ("paged_sectors", "find_num_key_value_heads")
        if SECTORS
        else ("paged_groups", "find_num_kv_heads")
    )
    module = f"gfsa.adapters.transformers.{layout}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr(paged_cache, name)
    expected = rf"needs transformers 5\.15 to 5\.17 or 5\.19.*got .*{name}.*Use generate\(\)"
    with pytest.raises(NotImplementedError, match=expected):
        grouped.generate_batch([[5, 6]])


def test_a_transformers_with_the_paged_cache_elsewhere_is_refused(
    grouped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, paged_cache.__name__, None)
    # a copy: other modules have imported from the original
    spec = importlib.util.spec_from_file_location("paged_copy", paged.__file__)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    # plugging imports this module, and must not fail with it
    assert not found.is_paged_cache(object())
    monkeypatch.delitem(sys.modules, "gfsa.adapters.transformers.batching_manager", False)
    with pytest.raises(
        NotImplementedError, match=r"another continuous batching .*Use generate\(\)"
    ):
        grouped.generate_batch([[5, 6]])


def test_copies_start_themselves_and_unplugged_models_are_as_before() -> None:
    model = decoder(GROUPED)
    inputs = prompts(4)
    expected = by_generate(model, inputs, new=5)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.init_continuous_batching.model is copied
        assert by_batching(copied, inputs, new=5) == expected
    gfsa.unplug(model)
    assert "init_continuous_batching" not in model.__dict__
    assert model.init_continuous_batching.__func__ is type(model).init_continuous_batching


def test_a_kept_manager_does_not_survive_other_filters(tmp_path: Path) -> None:
    model = decoder(GROUPED)
    inputs = prompts(9)
    gfsa.save(model, tmp_path)
    arguments = {"generation_config": greedy(5), "continuous_batching_config": settings()}
    for _ in range(2):
        (result,) = model.generate_batch(inputs, persistent_manager=True, **arguments).values()
        assert result.generated_tokens == by_generate(model, inputs, new=5)[0]
    gfsa.load(model, tmp_path)
    assert "_cached_continuous_batching_manager" not in model.__dict__
    model.generate_batch(inputs, persistent_manager=True, **arguments)
    gfsa.unplug(model)
    gfsa.plug(model, filter=gfsa.PageRank)
    (result,) = model.generate_batch(inputs, **arguments).values()
    assert result.generated_tokens == by_generate(model, inputs, new=5)[0]


@pytest.mark.parametrize("name", [GROUPED, MIXED])
def test_the_exclusive_and_the_depth_term(name: str) -> None:
    def filter(heads: int) -> gfsa.GraphFilter:
        return gfsa.GFSA(heads).exclude(0.5, learn=True)

    model = decoder(name, filter=filter, depth=True)
    asked = prompts(*LENGTHS)
    assert by_batching(model, asked, 12) == by_generate(model, asked, 12)
