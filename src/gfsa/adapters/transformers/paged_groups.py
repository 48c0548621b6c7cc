r"""The paged cache of transformers 5.15 to 5.17, with the powers of past tokens.

Layers are in groups of equal size, and the n-th layers of all groups share one tensor of keys and
one of values, with different blocks in it. A tensor of powers beside them has the same rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import (
    PagedAttentionCache,
    PagedAttentionMemoryHandler,
    find_head_dim,
    find_num_kv_heads,
    group_layers_by_attn_type,
)
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from gfsa.adapters.transformers.paged import (
    POWERS,
    FirstPass,
    powers_by_layer,
    refuse_another_degree,
)

OVERRIDDEN = (
    (PagedAttentionCache, "copy_cache"),
    (PagedAttentionMemoryHandler, "activation_peak"),
    (PagedAttentionMemoryHandler, "_equation_coefficients"),
    (OffloadingManager, "_offload_to_cpu"),
    (OffloadingManager, "restore_scheduled_requests"),
)
"""What is overridden here: where transformers does not have it, powers would be left behind."""


def share_of_keys_and_values(model: Any, config: ContinuousBatchingConfig) -> float:
    """Which part of a block's memory its keys and values take; the powers take the rest."""
    room = Room.of(model, model.config.get_text_config())
    ours = sum(room.counts) * room.page
    theirs = 2 * len(room.counts) * room.kv_heads * room.head_dim
    return theirs / (theirs + ours)


def plan(manager: Any) -> Room:
    """Choose the number of blocks and of tokens a batch with the powers counted."""
    model, settings = manager.model, manager.continuous_batching_config
    config = model.config.get_text_config()
    room = Room.of(model, config)
    sizes = _MemoryHandler(room, config, settings, model.dtype)
    # the cache checks these against the memory again, without the powers
    settings.max_batch_tokens, settings.num_blocks = sizes.infer_max_batch_tokens_and_num_blocks()
    return room


def add_powers(processor: Any, room: Room) -> None:
    """Give the cache and the offloading of a batch processor the powers."""
    powers = GroupPowers(processor.cache, room.counts, room.heads_beside(processor.cache))
    setattr(processor.cache, POWERS, powers)
    processor.cache.__class__ = _CacheWithPowers
    processor.offloading_manager.__class__ = _OffloadingWithPowers
    processor.offloading_manager.add_powers(powers)


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
        powers = powers_by_layer(model)
        groups, _ = group_layers_by_attn_type(config)
        # the n-th layers of all groups share a tensor
        counts = [
            max(powers.get(layer, 0) for layer in layers) for layers in zip(*groups, strict=True)
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


class GroupPowers:
    """``A·v, A²·v, …`` of past tokens, in tensors indexed like the keys of a paged cache.

    A paged cache has one tensor of keys for each layer of a group; layers of different groups use
    different blocks of it. The powers have the same layout, with a head for each query head.

    Args:
        cache: the paged cache.
        counts: for each of its tensors of keys, how many powers are stored: the degree less one.
        heads: query heads of a layer (of this process, under tensor parallelism).
    """

    def __init__(self, cache: Any, counts: Sequence[int], heads: int) -> None:
        shape = (cache.cache_shape[0], heads, cache.head_dim)
        self.tensors: list[Tensor] = []
        # a twin of the cache for each power: the same indices and the same update, other tensors
        self.twins: list[Any] = []
        for power in range(max(counts, default=0)):
            twin = copy.copy(cache)
            twin.key_cache = [
                # zeros: the rows that padding reads must be finite
                torch.zeros(
                    shape if power < count else (0,), dtype=cache.dtype, device=cache.device
                )
                for count in counts
            ]
            # the slot for values is not used: it gets tensors without features
            twin.value_cache = [tensor[..., :0] for tensor in twin.key_cache]
            for tensor in (*twin.key_cache, *twin.value_cache):
                torch._dynamo.mark_static_address(tensor)
            self.twins.append(twin)
            self.tensors += [tensor for tensor in twin.key_cache if tensor.dim() > 1]
        self.counts = tuple(counts)
        self.slots: dict[int, tuple[int, int]] = cache.layer_index_to_group_indices
        self.block_size: int = cache.block_size

    def blocks(self) -> list[Tensor]:
        """Every tensor as ``(blocks, block size, heads, features)``, a view."""
        return [tensor.view(-1, self.block_size, *tensor.shape[1:]) for tensor in self.tensors]

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks, when a request is forked."""
        for blocks in self.blocks():
            blocks[destinations] = blocks[sources]

    def first_pass(self, cache: Any) -> FirstPass:
        return FirstPass(cache)

    def further_pass(self, keys: Tensor, power: int, module: Any) -> _FurtherPass:
        _, slot = self.slots[module.layer_idx]
        refuse_another_degree(module, power, self.counts[slot])
        return _FurtherPass(keys, self.twins[power])


class _FurtherPass:
    """Returns the keys of the first pass and, as values, a power of all tokens."""

    def __init__(self, keys: Tensor, twin: Any) -> None:
        self.keys = keys
        self.twin = twin

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        read_index: list[Tensor],
        write_index: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        powers, _ = self.twin.update(
            value_states, value_states[..., :0], layer_idx, read_index, write_index
        )
        return self.keys, powers


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

    def add_powers(self, powers: GroupPowers) -> None:
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
