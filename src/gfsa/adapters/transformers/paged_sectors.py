r"""The paged cache of transformers 5.19 and newer, with the powers of past tokens.

The cache is one tensor of sectors. A sector belongs to one kind of attention at a time, whose
allocator divides it into blocks; a block holds a page for each layer of that kind, and a page the
keys and values of some tokens. The powers are in a second tensor with as many sectors, divided into
the same blocks: a block has as many pages here as its layers have powers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import (
    ATTN_TYPE_TO_ALLOCATOR,
    PagedAttentionCache,
    PagedAttentionMemoryHandler,
    find_head_dim,
    find_num_key_value_heads,
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
    (PagedAttentionCache, "update"),
    (PagedAttentionCache, "perform_cache_copy"),
    (PagedAttentionMemoryHandler, "bytes_per_batch_token"),
    (PagedAttentionMemoryHandler, "bytes_per_cache_sector"),
    (PagedAttentionMemoryHandler, "fixed_overhead_bytes"),
    (OffloadingManager, "_offload_to_cpu"),
    (OffloadingManager, "restore_scheduled_requests"),
)
"""What is overridden here: where transformers does not have it, powers would be left behind."""

if "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
    raise ImportError("PagedAttentionCache.update takes no kwargs")


def share_of_keys_and_values(model: Any, config: ContinuousBatchingConfig) -> float:
    """Which part of a sector's memory its keys and values take; the powers take the rest."""
    room = Room.of(model, config, processes=1)
    return room.bytes_per_sector / (room.bytes_per_sector + room.bytes_of_powers)


def plan(manager: Any) -> Room:
    """Choose the number of blocks and of tokens a batch with the powers counted."""
    helper, settings = manager.distributed_helper, manager.continuous_batching_config
    split = helper.tp_size > 1 and helper.are_kv_heads_tp_ed()
    room = Room.of(manager.model, settings, helper.tp_size if split else 1)
    sizes = _MemoryHandler(room, manager.model, settings)
    settings.max_batch_tokens, sectors = sizes.infer_max_batch_tokens_and_num_sectors()
    if settings.num_blocks is None:
        # without a number of blocks the cache would choose one itself, and not count the powers
        settings.num_blocks = sectors * room.bytes_per_sector // room.bytes_per_block
        if settings.num_blocks == 0:
            raise MemoryError(
                f"{sizes.available_memory} bytes do not hold one block of {room.bytes_per_block} "
                "bytes with its powers. Raise max_memory_percent or lower page_size"
            )
    return room


def add_powers(processor: Any, room: Room) -> None:
    """Give the cache and the offloading of a batch processor the powers."""
    cache = processor.cache
    powers = SectorPowers(cache, room.counts, room.heads)
    setattr(cache, POWERS, powers)
    cache.__class__ = _CacheWithPowers
    processor.offloading_manager.__class__ = _OffloadingWithPowers
    processor.offloading_manager.add_powers(powers)


class Room(NamedTuple):
    """What the powers of one model need in a paged cache.

    Args:
        counts: powers for each layer: its degree less one.
        heads: query heads of a process.
        head_dim: features of a head.
        bytes_per_sector: of keys and values.
        bytes_of_powers: of powers in a sector.
        tokens_per_sector: at most.
        bytes_per_block: of the keys and values of all layers, for the tokens of one page.
        kinds: the kinds of attention of the model.
    """

    counts: dict[int, int]
    heads: int
    head_dim: int
    bytes_per_sector: int
    bytes_of_powers: int
    tokens_per_sector: int
    bytes_per_block: int
    kinds: list[str]

    @classmethod
    def of(cls, model: Any, settings: ContinuousBatchingConfig, processes: int) -> Room:
        """The room in the cache of a model whose heads are split among some processes."""
        config, counts = model.config.get_text_config(), powers_by_layer(model)
        # made as the cache will make them, because the number of sectors is chosen before it
        allocators = [
            ATTN_TYPE_TO_ALLOCATOR[kind](
                index=index,
                layer_indices=layers,
                config=config,
                num_key_value_heads=find_num_key_value_heads(config) // processes,
                cache_dtype=model.dtype,
                page_size=settings.page_size,
                allow_block_sharing=settings.allow_block_sharing,
            )
            for index, (kind, layers) in enumerate(group_layers_by_attn_type(config).items())
        ]
        sector = lcm(*(allocator.bytes_per_block for allocator in allocators), 128)
        heads, features = config.num_attention_heads // processes, find_head_dim(config)
        page = settings.page_size * heads * features * model.dtype.itemsize
        pages = pages_per_sector(allocators, counts, sector)
        return cls(
            counts,
            heads,
            features,
            bytes_per_sector=sector,
            bytes_of_powers=pages * page,
            tokens_per_sector=max(
                sector // allocator.bytes_per_block * allocator.tokens_per_page
                for allocator in allocators
            ),
            bytes_per_block=sum(allocator.bytes_per_block for allocator in allocators),
            kinds=[allocator.layer_type for allocator in allocators],
        )


def pages_per_sector(allocators: Any, counts: Mapping[int, int], bytes_per_sector: int) -> int:
    """Pages of powers in a sector, whichever allocator uses it."""
    return max(
        bytes_per_sector
        // allocator.bytes_per_block
        * sum(counts.get(layer, 0) for layer in allocator.layer_indices)
        for allocator in allocators
    )


class SectorPowers:
    """``A·v, A²·v, …`` of past tokens, in blocks with the numbers of those of keys and values.

    Args:
        cache: the paged cache.
        counts: how many powers each layer stores: the degree less one.
        heads: query heads of a layer (of this process, under tensor parallelism).
    """

    def __init__(self, cache: Any, counts: Mapping[int, int], heads: int) -> None:
        allocators = cache.cache_allocators
        self.counts = dict(counts)
        self.pages = pages_per_sector(allocators.values(), counts, cache.bytes_per_sector)
        self.divisions = {
            name: _Division(allocator, self.counts, self.pages)
            for name, allocator in allocators.items()
        }
        (self.tokens_per_page,) = {x.tokens_per_page for x in allocators.values()}
        sectors = cache.cache_tensor.numel() // cache.bytes_per_sector
        features = find_head_dim(cache.config)
        self.shape = (self.pages * self.tokens_per_page, heads, features)
        # zeros: the rows that padding reads must be finite
        tensor = torch.zeros((sectors, *self.shape), dtype=cache.dtype, device=cache.device)
        torch._dynamo.mark_static_address(tensor)
        self.tensors = [tensor]
        # a twin of the cache for each power: the same update, other tensors and other rows
        self.twins: list[Any] = []
        for power in range(max(counts.values(), default=0)):
            twin = copy.copy(cache)
            twin.layer_to_allocator = {}
            for name, division in self.divisions.items():
                own = _TwinAllocator(allocators[name], division, power, tensor.flatten(0, 1))
                twin.layer_to_allocator |= dict.fromkeys(division.first_page, own)
            self.twins.append(twin)

    def first_pass(self, cache: Any) -> _FirstPass:
        return _FirstPass(cache)

    def further_pass(self, keys: Tensor, power: int, module: Any) -> _FurtherPass:
        refuse_another_degree(module, power, self.counts.get(module.layer_idx, 0))
        return _FurtherPass(keys, self.twins[power])

    def copy_blocks(
        self, name: str, source: Tensor, sources: list[int], target: Tensor, targets: list[int]
    ) -> None:
        """Copy blocks of one allocator between tensors of sectors, or inside of one."""
        division = self.divisions[name]
        here, there = division.blocks(source), division.blocks(target)
        there[division.places(targets, target.device)] = here[
            division.places(sources, source.device)
        ].to(target.device)


class _Division:
    """How an allocator divides a sector of powers: its blocks, and the pages of its layers.

    Args:
        allocator: of transformers.
        counts: how many powers each layer stores.
        pages: pages in a sector; an allocator may leave some of them unused.
    """

    def __init__(self, allocator: Any, counts: Mapping[int, int], pages: int) -> None:
        self.tokens_per_page: int = allocator.tokens_per_page
        self.stride: int = allocator.block_physical_stride
        self.blocks_per_sector: int = allocator.blocks_per_sector
        self.rows_per_sector = pages * self.tokens_per_page
        self.first_page: dict[int, int] = {}
        self.pages_per_block = 0
        for layer in allocator.layer_indices:
            self.first_page[layer] = self.pages_per_block
            self.pages_per_block += counts.get(layer, 0)

    def rows(self, index: Tensor) -> Tensor:
        """The rows of a block's first page, from the indices of its first page of keys."""
        block = index // self.stride
        offset = index - block * self.stride
        sector, block = block // self.blocks_per_sector, block % self.blocks_per_sector
        first = sector * self.rows_per_sector + block * self.pages_per_block * self.tokens_per_page
        return first + offset

    def blocks(self, tensor: Tensor) -> Tensor:
        """``(sectors, blocks, rows, heads, features)``, a view of a tensor of sectors."""
        rows = self.pages_per_block * self.tokens_per_page
        used = tensor[:, : self.blocks_per_sector * rows]
        return used.view(len(tensor), self.blocks_per_sector, rows, *tensor.shape[2:])

    def places(self, blocks: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """The sector of each block, and the place of the block in it."""
        numbers = torch.tensor(blocks, dtype=torch.long, device=device)
        return numbers // self.blocks_per_sector, numbers % self.blocks_per_sector


class _TwinAllocator:
    """Stores and reads one power where an allocator of transformers has keys and values.

    The allocator's own ``update`` does it: its keys are the power, its values have no features.
    """

    def __init__(self, allocator: Any, division: _Division, power: int, rows: Tensor) -> None:
        self.index: int = allocator.index
        self.layer_type: str = allocator.layer_type
        self.division = division
        self.allocator = copy.copy(allocator)
        self.allocator._kv_token_views = {
            layer: (own, own[..., :0])
            for layer, page in division.first_page.items()
            for own in [rows[(page + power) * division.tokens_per_page :]]
        }

    def update(
        self,
        power: Tensor,
        nothing: Tensor,
        layer_idx: int,
        read_index: Tensor,
        write_index: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows = self.division.rows
        read: tuple[Tensor, Tensor] = self.allocator.update(
            power, nothing, layer_idx, rows(read_index), rows(write_index)
        )
        return read


# attention functions check for a PagedAttentionCache, and call its ``update`` alone
class _FirstPass(FirstPass, PagedAttentionCache):
    """The cache of the first pass."""


class _FurtherPass(PagedAttentionCache):
    """Returns the keys of the first pass and, as values, a power of all tokens."""

    def __init__(self, keys: Tensor, twin: Any) -> None:
        self.keys = keys
        self.twin = twin

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        powers, _ = self.twin.update(value_states, value_states[..., :0], layer_idx, kwargs)
        return self.keys, powers


class _MemoryHandler(PagedAttentionMemoryHandler):
    """Chooses the number of sectors with the powers counted."""

    kv_heads_at_peak: int

    def __init__(self, room: Room, model: Any, settings: ContinuousBatchingConfig) -> None:
        config = model.config.get_text_config()
        slices = getattr(model, "_supports_logits_to_keep", None)
        super().__init__(
            config,
            settings,
            model.dtype,
            bytes_per_sector=room.bytes_per_sector,
            tokens_per_sector=room.tokens_per_sector,
            bytes_per_block=room.bytes_per_block,
            attn_types=room.kinds,
            model_supports_logits_to_keep=bool(callable(slices) and slices()),
        )
        self.room = room
        self.most = max(room.counts.values(), default=0)
        if self.most:
            # the keys as they are read, repeated for each query head, and a power of all tokens
            heads = find_num_key_value_heads(config) + 2 * config.num_attention_heads
            self.kv_heads_at_peak = max(self.kv_heads_at_peak, heads)

    @property
    def bytes_per_batch_token(self) -> int:
        size = self.config.num_attention_heads * self.room.head_dim * self.activation_dtype.itemsize
        # the powers of the new tokens, and what they are combined to
        added = (1 + self.most) * size if self.most else 0
        return int(super().bytes_per_batch_token) + added

    @property
    def bytes_per_cache_sector(self) -> int:
        return int(super().bytes_per_cache_sector) + self.room.bytes_of_powers

    @property
    def fixed_overhead_bytes(self) -> int:
        # the sectors that padding reads and writes have powers, too
        return int(super().fixed_overhead_bytes) + 2 * self.room.bytes_of_powers


class _CacheWithPowers(PagedAttentionCache):
    """Copies the powers of a block with its keys and values."""

    def perform_cache_copy(self, copy_src_and_dst: dict[str, tuple[list[int], list[int]]]) -> None:
        super().perform_cache_copy(copy_src_and_dst)
        powers: SectorPowers = getattr(self, POWERS)
        (tensor,) = powers.tensors
        for name, (sources, targets) in copy_src_and_dst.items():
            if sources:
                powers.copy_blocks(name, tensor, sources, tensor, targets)


class _OffloadingWithPowers(OffloadingManager):
    """Moves the powers of a request to the CPU and back with its keys and values."""

    def add_powers(self, powers: SectorPowers) -> None:
        """Reserve memory on the CPU, as many sectors as there are for keys and values."""
        self.powers = powers
        if self._num_cpu_sectors:
            shape = (self._num_cpu_sectors, *powers.shape)
            dtype = powers.tensors[0].dtype
            self.cpu_powers = torch.empty(shape, dtype=dtype, pin_memory=True)

    def _offload_to_cpu(
        self, victims: Any, victim_block_tables: dict[str, dict[str, list[int]]]
    ) -> set[str]:
        offloaded: set[str] = super()._offload_to_cpu(victims, victim_block_tables)
        (tensor,) = self.powers.tensors
        for request in offloaded:
            with self._stream_ctx():
                for name, on_cpu in self._request_id_to_cpu_blocks[request].items():
                    ours = victim_block_tables[request][name]
                    self.powers.copy_blocks(name, tensor, ours, self.cpu_powers, on_cpu)
        return offloaded

    def restore_scheduled_requests(self, requests_in_batch: Any) -> None:
        (tensor,) = self.powers.tensors
        for future in requests_in_batch:
            if not future.state.is_cpu_offloaded:
                continue
            request = future.state.request_id
            with self._stream_ctx():
                for name, on_cpu in self._request_id_to_cpu_blocks[request].items():
                    table = self.cache.cache_allocators[name].block_table.get(request, [])
                    kept = min(len(table), len(on_cpu))
                    self.powers.copy_blocks(
                        name, self.cpu_powers, on_cpu[:kept], tensor, table[:kept]
                    )
        super().restore_scheduled_requests(requests_in_batch)
