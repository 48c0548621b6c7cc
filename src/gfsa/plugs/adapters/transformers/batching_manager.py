r"""Continuous batching with room for the powers of past tokens: memory, forks and offloading.

transformers' manager builds one paged cache, of as many blocks as the memory of the device holds.
Here a block also holds :math:`A v, …, A^{m-1} v` of its tokens: they are counted when the number of
blocks is chosen, copied when a request is forked, and moved when a request goes to the CPU. Blocks
that requests with the same prompt share are shared with their powers, which in causal attention
depend on the same earlier tokens as the keys and values do.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import (
    PagedAttentionCache,
    PagedAttentionMemoryHandler,
    find_head_dim,
    find_num_kv_heads,
    group_layers_by_attn_type,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from gfsa.plugs.adapter import CHILD
from gfsa.plugs.adapters.transformers.paged import POWERS, PagedPowers

# what is overridden below: where transformers no longer has it, powers would be left behind
_OVERRIDDEN = (
    (ContinuousBatchingManager, "_create_batch_processor"),
    (PagedAttentionCache, "copy_cache"),
    (PagedAttentionMemoryHandler, "activation_peak"),
    (PagedAttentionMemoryHandler, "_equation_coefficients"),
    (OffloadingManager, "_offload_to_cpu"),
    (OffloadingManager, "restore_scheduled_requests"),
)


def start(model: Any, generation_config: Any, config: Any, workload_hints: Any) -> Any:
    """``init_continuous_batching`` of a plugged model; arguments and result are the same."""
    missing = [f"{kind.__name__}.{name}" for kind, name in _OVERRIDDEN if not hasattr(kind, name)]
    if missing:
        raise NotImplementedError(
            f"transformers {transformers.__version__} has no {', '.join(missing)}, which is "
            "needed for continuous batching of a plugged model. Use generate() or transformers 5.17"
        )
    if config is None:
        general = model.generation_config if generation_config is None else generation_config
        config = getattr(general, "continuous_batching_config", None) or ContinuousBatchingConfig()
    if config.max_blocks_per_request:
        raise ValueError(
            f"max_blocks_per_request={config.max_blocks_per_request} asks for a decoding kernel "
            "that stores keys and values only, not the powers that a filter needs; leave it at "
            "None, or pass 0"
        )
    config = copy.deepcopy(config)
    config.max_blocks_per_request = 0
    Room.of(model, model.config.get_text_config()).shrink_offloading(config)
    manager = type(model).init_continuous_batching(model, generation_config, config, workload_hints)
    if type(manager) is ContinuousBatchingManager:
        manager.__class__ = FilteredBatchingManager
    # the filtered name of the paged implementation is registered now, not in a compiled forward
    for module in _plugged(model):
        _ = module.config._attn_implementation
    return manager


class FilteredBatchingManager(ContinuousBatchingManager):
    """A manager whose cache has room for the powers of past tokens."""

    def _create_batch_processor(self) -> Any:
        if self.batch_processor is not None:
            return super()._create_batch_processor()
        config = self.model.config.get_text_config()
        room = Room.of(self.model, config)
        settings = self.continuous_batching_config
        sizes = _MemoryHandler(room, config, settings, self.model.dtype)
        # the cache checks these against the memory again, without the powers
        settings.max_batch_tokens, settings.num_blocks = (
            sizes.infer_max_batch_tokens_and_num_blocks()
        )
        processor = super()._create_batch_processor()
        powers = PagedPowers(processor.cache, room.counts, room.heads_beside(processor.cache))
        setattr(processor.cache, POWERS, powers)
        processor.cache.__class__ = _CacheWithPowers
        processor.offloading_manager.__class__ = _OffloadingWithPowers
        processor.offloading_manager.add_powers(powers)
        return processor


class Room(NamedTuple):
    """What the powers of one model need in a paged cache.

    Args:
        counts: powers for each of the cache's tensors of keys: the largest degree less one.
        heads: query heads.
        kv_heads: heads of the keys.
        head_dim: features of a head.
    """

    counts: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: nn.Module, config: Any) -> Room:
        degrees: dict[int, int] = {}
        for module in _plugged(model):
            layer, degree = module.layer_idx, module.gfsa.degree
            degrees[layer] = max(degree, degrees.get(layer, 0))
        groups, _ = group_layers_by_attn_type(config)
        # the n-th layers of all groups share a tensor
        counts = [
            max(max(degrees.get(layer, 0) - 1, 0) for layer in layers)
            for layers in zip(*groups, strict=True)
        ]
        heads, kv_heads = config.num_attention_heads, find_num_kv_heads(config)
        return cls(tuple(counts), heads, kv_heads, find_head_dim(config))

    @property
    def page(self) -> int:
        """Numbers for one power of one token in one layer."""
        return self.heads * self.head_dim

    def heads_beside(self, cache: PagedAttentionCache) -> int:
        """Query heads beside the cache's heads of keys, which tensor parallelism may have split."""
        return self.heads * int(cache.num_key_value_heads) // self.kv_heads

    def shrink_offloading(self, config: ContinuousBatchingConfig) -> None:
        """Let keys and values take their share of the CPU memory; the powers take the rest."""
        ours = sum(self.counts) * self.page
        theirs = 2 * len(self.counts) * self.kv_heads * self.head_dim
        share = theirs / (theirs + ours)
        if config.cpu_offload_space is None:
            config.cpu_offload_space_safety_threshold *= share
        else:
            config.cpu_offload_space *= share


class _MemoryHandler(PagedAttentionMemoryHandler):
    """Chooses the number of blocks with the powers counted."""

    def __init__(
        self, room: Room, config: Any, settings: ContinuousBatchingConfig, dtype: torch.dtype
    ) -> None:
        groups, types = group_layers_by_attn_type(config)
        super().__init__(config, settings, dtype, types, len(groups[0]))
        self.room = room

    @property
    def activation_peak(self) -> dict[str, tuple[int, ...]]:
        peaks = dict(super().activation_peak)
        if any(self.room.counts):
            per_token, per_page, *others = peaks["attention"]
            # the powers of the new tokens, and those of all tokens as they are read; beside them
            # the keys, repeated for each query head
            size = self.room.page * self.activation_dtype.itemsize
            added = (1 + max(self.room.counts)) * size, 2 * size
            peaks["attention"] = (per_token + added[0], per_page + added[1], *others)
        return peaks

    def _equation_coefficients(self, peak_deltas: tuple[int, ...]) -> tuple[int, ...]:
        per_token, per_page, *others = super()._equation_coefficients(peak_deltas)
        stored = sum(self.room.counts) * self.room.page * self.cache_dtype.itemsize
        return (per_token, per_page + stored, *others)


class _CacheWithPowers(PagedAttentionCache):
    """Copies the powers of a block with its keys and values."""

    def copy_cache(self, list_source_blocks: list[int], list_forked_blocks: list[int]) -> None:
        super().copy_cache(list_source_blocks, list_forked_blocks)
        getattr(self, POWERS).copy_blocks(list_source_blocks, list_forked_blocks)


class _OffloadingWithPowers(OffloadingManager):
    """Moves the powers of a request to the CPU and back with its keys and values."""

    def add_powers(self, powers: PagedPowers) -> None:
        """Reserve memory on the CPU, as many blocks as there are for keys and values."""
        self.powers = powers.blocks()
        self.cpu_powers = [
            torch.empty(
                (self._num_cpu_blocks, *blocks.shape[1:]), dtype=blocks.dtype, pin_memory=True
            )
            for blocks in self.powers
            if self._num_cpu_blocks
        ]

    def _offload_to_cpu(self, victims: Any) -> set[str]:
        offloaded: set[str] = super()._offload_to_cpu(victims)
        for request in offloaded:
            ours = self._blocks_of(request)
            on_cpu = self._request_id_to_cpu_blocks[request]
            with self._stream_ctx():
                for blocks, saved in zip(self.powers, self.cpu_powers, strict=True):
                    for here, there in zip(ours, on_cpu, strict=True):
                        saved[there].copy_(blocks[here], non_blocking=True)
        return offloaded

    def restore_scheduled_requests(self, requests_in_batch: Any) -> None:
        for future in requests_in_batch:
            if not future.state.is_cpu_offloaded:
                continue
            request = future.state.request_id
            ours = self._blocks_of(request, self._request_id_to_group_block_counts[request])
            on_cpu = self._request_id_to_cpu_blocks[request]
            with self._stream_ctx():
                for blocks, saved in zip(self.powers, self.cpu_powers, strict=True):
                    for here, there in zip(ours, on_cpu, strict=True):
                        blocks[here].copy_(saved[there], non_blocking=True)
        super().restore_scheduled_requests(requests_in_batch)

    def _blocks_of(self, request: str, counts: list[int] | None = None) -> list[int]:
        """The blocks of a request on the device, group by group, the first few of each group."""
        tables = [m.block_table.get(request, []) for m in self.cache.group_cache_managers]
        counts = [len(table) for table in tables] if counts is None else counts
        return [
            block for table, count in zip(tables, counts, strict=True) for block in table[:count]
        ]


def _plugged(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if CHILD in module._modules]
