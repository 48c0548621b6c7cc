r"""Attention with a paged cache (continuous batching): a call of transformers' function a pass.

The functions ``paged|sdpa``, ``paged|eager`` and ``paged|flash_attention_…`` fill the cache
themselves: each calls ``cache.update`` with the new keys and values and attends to what that
returns. A filter of degree m calls the function m times. The first call gets the cache, the others
get a stand-in whose ``update`` returns the same keys and, as values, a power of all tokens:

.. math:: (A^{k+1} v)_{new} = A_{new}\,[(A^k v)_{past};\,(A^k v)_{new}]

The powers of past tokens are in :class:`PagedPowers`, at the indices of their keys and values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gfsa.operators import Operator
from gfsa.operators.base import repeat_heads
from gfsa.plugs.adapters.transformers.product_check import name_of

POWERS = "gfsa_powers"
"""The attribute of a paged cache that holds its :class:`PagedPowers`."""


class PagedPowers:
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

    def twin(self, power: int, module: Any) -> Any:
        """The twin that stores power ``power + 1`` of a layer; raises if it has no room for it."""
        _, slot = self.slots[module.layer_idx]
        if power >= self.counts[slot]:
            raise ValueError(
                f"the paged cache stores {self.counts[slot]} powers of A·v for {name_of(module)}, "
                f"whose filter needs {power + 1} or more: the filter was changed after continuous "
                "batching had started. Start it again"
            )
        return self.twins[power]


class _FirstPass:
    """A paged cache, which keeps the keys that it returned for the passes that follow."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.keys: Any = None

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, values = self.cache.update(*args, **kwargs)
        return self.keys, values


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


class PagedOperator(Operator):
    """The rows of A for the newest tokens of every request in a batch.

    Args:
        attend: ``(key, value, cache, groups)`` → the product ``(1, H, N, D)`` of the newest rows.
        module: the attention module.
        query: ``(1, H, N, D)``, the tokens of all requests one after another.
        key: ``(1, H / groups, N, D)``.
        cache: the paged cache.
    """

    def __init__(
        self, attend: Callable[..., Tensor], module: Any, query: Tensor, key: Tensor, cache: Any
    ) -> None:
        self.attend = attend
        self.module = module
        self.query = query
        self.key = key
        self.cache = cache

    def apply(self, x: Tensor) -> Tensor:
        raise TypeError(
            "with a paged cache only the powers of attention are known, not its product with "
            "other tokens"
        )

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        tokens = [repeat_heads(v, self.query)]
        if degree == 0:
            return tokens
        heads = self.query.shape[1]
        first = _FirstPass(self.cache)
        tokens.append(self.attend(self.key, v, first, heads // self.key.shape[1]))
        if degree > 1:
            # all keys, with a head for each query head like the powers
            keys = first.keys.repeat_interleave(heads // first.keys.shape[1], dim=1)
            stored: PagedPowers = getattr(self.cache, POWERS)
            for power in range(degree - 1):
                further = _FurtherPass(keys, stored.twin(power, self.module))
                tokens.append(self.attend(self.key, tokens[-1], further, 1))
        return tokens

    def dense(self) -> Tensor:
        raise ValueError(
            "output_attentions is not supported with a paged cache (continuous batching): the rows "
            "of H need the whole map of the past. Use generate() with use_cache=False"
        )


def refuse_call(module: Any, implementation: str, cache: Any, block_table: Tensor | None) -> None:
    """Raise where a call of a paged attention function cannot be filtered."""
    if cache is None:
        raise ValueError(
            f"{name_of(module)} was called with attn_implementation={implementation!r} but without "
            "a paged cache. Use generate_batch, or model.set_attn_implementation('sdpa')"
        )
    if not hasattr(cache, POWERS):
        raise ValueError(
            f"the paged cache of {name_of(module)} has no room for the powers of attention: it was "
            "not started by the plugged model. Use model.generate_batch, "
            "model.continuous_batching_context_manager or model.init_continuous_batching"
        )
    if block_table is not None:
        raise NotImplementedError(
            "the decoding kernel with a block table stores keys and values only. Pass "
            "ContinuousBatchingConfig(max_blocks_per_request=0)"
        )
