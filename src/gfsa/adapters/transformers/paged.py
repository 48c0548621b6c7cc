r"""Attention with a paged cache (continuous batching): a call of transformers' function a pass.

An attention function that is given a paged cache fills it itself: it calls ``cache.update`` with
the new keys and values and attends to what that returns. A filter of degree m calls the function m
times. The first call gets the cache, the others get a stand-in whose ``update`` returns the same
keys and, as values, a power of all tokens:

.. math:: (A^{k+1} v)_{new} = A_{new}\,[(A^k v)_{past};\,(A^k v)_{new}]

The powers of past tokens are stored where their keys and values are. How that is depends on the
version of transformers: ``paged_groups.py`` (5.15 to 5.17), ``paged_sectors.py`` (since 5.19).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from gfsa.adapters.transformers.product_check import name_of
from gfsa.operators import Operator
from gfsa.operators.base import repeat_heads
from gfsa.plugs.adapter import CHILD

_CACHES: tuple[type, ...] = ()
try:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    _CACHES = (PagedAttentionCache,)
except ImportError:
    # a transformers that has it elsewhere: models are plugged, and batching refuses to start
    pass

VERSIONS = "'transformers>=5.15,<5.23,!=5.18.*'"
"""What pip installs for continuous batching of a plugged model."""

POWERS = "gfsa_powers"
"""The attribute of a paged cache that holds its :class:`PagedPowers`."""


def plugged_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that have a filter."""
    return [module for module in model.modules() if CHILD in module._modules]


def powers_by_layer(model: nn.Module) -> dict[int, int]:
    """How many powers of a past token each layer of the cache stores: its degree less one."""
    powers: dict[int, int] = {}
    for module in plugged_modules(model):
        layer = module.layer_idx
        powers[layer] = max(module.gfsa.degree - 1, powers.get(layer, 0))
    return powers


class PagedPowers(Protocol):
    """``A·v, A²·v, …`` of past tokens, stored beside the keys and values of a paged cache."""

    def first_pass(self, cache: Any) -> Any:
        """The cache; after a call of its ``update``, the keys that it returned are ``keys``."""

    def further_pass(self, keys: Tensor, power: int, module: Any) -> Any:
        """A cache whose ``update`` stores power ``power + 1`` and returns it with these keys."""


class FirstPass:
    """A paged cache, which keeps the keys that it returned for the passes that follow."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.keys: Any = None

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, values = self.cache.update(*args, **kwargs)
        return self.keys, values


def refuse_another_degree(module: Any, power: int, stored: int) -> None:
    """Raise where a layer needs power ``power + 1`` and only ``stored`` of them have room."""
    if power >= stored:
        raise ValueError(
            f"the paged cache stores {stored} powers of A·v for {name_of(module)}, "
            f"whose filter needs {power + 1} or more: the filter was changed after continuous "
            "batching had started. Start it again"
        )


def is_paged_cache(cache: Any) -> bool:
    """Whether an attention function's argument ``cache`` is the cache of continuous batching."""
    return isinstance(cache, _CACHES)


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
        stored: PagedPowers = getattr(self.cache, POWERS)
        first = stored.first_pass(self.cache)
        tokens.append(self.attend(self.key, v, first, heads // self.key.shape[1]))
        if degree > 1:
            # all keys, with a head for each query head like the powers
            keys = first.keys.repeat_interleave(heads // first.keys.shape[1], dim=1)
            for power in range(degree - 1):
                further = stored.further_pass(keys, power, self.module)
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
