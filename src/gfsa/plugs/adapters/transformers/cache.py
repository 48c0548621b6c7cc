"""Decoding with a cache, exactly: the powers of past tokens ride along with their keys and values.

In causal attention a past token never sees a later one, so ``A·v, A²·v, …`` of past tokens do not
change when a token is added. A layer of a transformers cache therefore gets companions: further
cache layers of its own kind, one for each power that is needed again, that hold ``A^k·v`` in the
same rows as the layer holds keys and values. Whatever happens to the layer (beams reordered,
tokens cropped, a window sliding, a static buffer) happens to its companions.

Some models let late layers look at the keys and values of an earlier one (Gemma 3n). Their maps are
their own, and so are their powers: the one cache layer has companions for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from gfsa.operators import Coefficients, Operator, Visibility
from gfsa.operators.base import combine, value_of

# what a cache does to its layers besides filling them
_FOLLOWED = (
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "crop",
    "offload",
    "prefetch",
    "reorder_cache",
    "reset",
)


class Place(NamedTuple):
    """A layer of a cache, and the number of the module that looks at it."""

    layer: Any
    owner: int


class CachedOperator(Operator):
    r"""The rows of A for the newest tokens, with the powers of all earlier ones at hand.

    .. math:: (A^{k+1} v)_{new} = A_{new}\,[(A^k v)_{past};\,(A^k v)_{new}]

    Args:
        rows: an operator whose ``apply`` takes all tokens and gives the new ones.
        place: the layer of the cache, which has just taken in the new keys and values.
        new: how many tokens are new.
        keys: how many of the cache's rows ``rows`` looks at.
    """

    def __init__(self, rows: Operator, place: Place, new: int, heads: int, keys: int) -> None:
        self.rows = rows
        self.place = place
        self.new = new
        self.heads = heads
        self.keys = keys

    def apply(self, x: Tensor) -> Tensor:
        return self.rows.apply(x)

    def polynomial(self, coeffs: Tensor | Coefficients, v: Tensor) -> Tensor:
        coeffs = value_of(coeffs)
        powers = self.powers(v, coeffs.shape[-1] - 1)
        # the work on one token takes no time, launching it does
        plain = type(v) is Tensor and not torch.is_grad_enabled()
        return combine(coeffs, powers, in_one_go=plain and not torch.compiler.is_compiling())

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        newest = _newest(self.place.layer, v, self.new)
        if newest.shape[1] != self.heads:
            newest = newest.repeat_interleave(self.heads // newest.shape[1], dim=1)
        if degree == 0:
            return [newest]
        tokens = [newest, self.rows.apply(v)]
        if degree > 1:
            for companion in _companions(self.place, degree - 1, self.new)[: degree - 1]:
                _refuse_another_past(self.place.layer, companion, self.new)
                everything = _remember(companion, tokens[-1], self.keys)
                tokens.append(self.rows.apply(everything))
        return tokens

    def visibility(self) -> Visibility | None:
        return self.rows.visibility()

    def second_pass(self, heads: Sequence[int]) -> Operator | None:
        rows = self.rows.second_pass(heads)
        return None if rows is None else _FurtherPowers(rows, self)


class _FurtherPowers(Operator):
    """The second and further passes of some heads: the cache keeps the powers of those alone."""

    def __init__(self, rows: Operator, first: CachedOperator) -> None:
        self.rows = rows
        self.first = first

    def apply(self, x: Tensor) -> Tensor:
        return self.rows.apply(x)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        tokens = [v]
        companions = _companions(self.first.place, degree, self.first.new)
        for companion in companions[:degree]:
            everything = _remember(companion, tokens[-1], self.first.keys)
            tokens.append(self.rows.apply(everything))
        return tokens


def place_in(cache: Any, module: Any) -> Place:
    """Where the cache keeps what a module looks at; refuses caches that cannot hold powers."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        raise TypeError(
            f"a plugged model decodes with a transformers Cache, got {type(cache).__name__}; "
            "pass use_cache=False, or a DynamicCache or StaticCache"
        )
    index: int = module.layer_idx
    source = _source_of(module) if getattr(module, "is_kv_shared_layer", False) else index
    if source is None or source >= len(cache.layers):
        raise ValueError(
            f"layer {index} has no place in the cache: its keys and values are those of another "
            "layer. Pass use_cache=False"
        )
    return Place(cache.layers[source], index)


def _source_of(module: Any) -> int | None:
    """The layer whose keys and values a sharing one looks at: the last of its kind with its own."""
    kinds = module.config.layer_types
    own = len(kinds) - module.config.num_kv_shared_layers
    alike = [i for i, kind in enumerate(kinds[:own]) if kind == kinds[module.layer_idx]]
    return alike[-1] if alike else None


def _companions(place: Place, count: int, new: int) -> list[Any]:
    if count < 1:
        return []
    layer = place.layer
    if not hasattr(layer, "gfsa_powers"):
        layer.gfsa_powers = {}
        for name in _FOLLOWED:
            if hasattr(layer, name):
                setattr(layer, name, _Follower(layer, name))
    companions: list[Any] | None = layer.gfsa_powers.get(place.owner)
    if companions is None:
        _refuse_a_past_without_powers(layer, new)
        companions = layer.gfsa_powers[place.owner] = [_alike(layer) for _ in range(count)]
    elif len(companions) < count:
        raise ValueError(
            f"this cache was filled by a filter of degree {len(companions) + 1}, the filter now "
            f"has degree {count + 1}; start from a new cache"
        )
    return companions


def _refuse_a_past_without_powers(layer: Any, new: int) -> None:
    # a static layer's length lives on the device: reading it there is fine once, before the first
    # token, but not in a compiled graph
    if torch.compiler.is_compiling():
        return
    past = int(layer.get_seq_length()) - new
    if past > 0:
        raise ValueError(
            f"the cache holds {past} tokens without the powers of attention that the filter "
            "needs: it was filled by prefix tuning, by an unplugged model, or while training. "
            "Start from a new cache (prefix tuning cannot be combined with a filter: its prefix "
            "has keys but no queries)"
        )


def _refuse_another_past(layer: Any, companion: Any, new: int) -> None:
    """The powers must belong to the very tokens whose keys and values the layer holds."""
    held, known = layer.get_seq_length(), companion.get_seq_length()
    # a length on a GPU is not waited for; in a compiled graph there is nothing to read
    if torch.compiler.is_compiling() or (isinstance(held, Tensor) and held.device.type != "cpu"):
        return
    if known + new != held:
        raise ValueError(
            f"the cache holds {int(held) - new} earlier tokens, but the powers of {int(known)}: an "
            "unplugged model has used it in between, or the layer attends more than once a "
            "forward. Start from a new cache, or pass use_cache=False"
        )


class _GrowingPowers(DynamicLayer):
    """A layer that grows as a dynamic one does, with one of its two slots in use."""

    keys: Any

    def add(self, tokens: Tensor) -> Tensor:
        """Take in the newest tokens; returns all of them."""
        if not self.is_initialized:
            return self.update(tokens, tokens[..., :0])[0]
        self.keys = everything = torch.cat([self.keys, tokens], dim=-2)
        return everything


def _alike(layer: Any) -> Any:
    """An empty cache layer of the same kind."""
    kind = type(layer)
    if kind is DynamicLayer:
        return _GrowingPowers()
    if kind is DynamicSlidingWindowLayer:
        made = DynamicSlidingWindowLayer(sliding_window=layer.sliding_window)
        made.record_past = layer.record_past
        return made
    if kind is StaticLayer:
        return StaticLayer(max_cache_len=layer.max_cache_len)
    if kind is StaticSlidingWindowLayer:
        # the layer has already taken the smaller of its window and its length
        return StaticSlidingWindowLayer(layer.max_cache_len, sliding_window=layer.max_cache_len)
    raise TypeError(
        f"a plugged model cannot decode with a {kind.__name__}; use a dynamic or static cache "
        "(with or without a sliding window), or use_cache=False"
    )


def _remember(companion: Any, tokens: Tensor, keys: int) -> Tensor:
    """Add the newest tokens' power to the companion; returns its first ``keys`` rows."""
    # an offloading cache has sent it away together with the keys
    companion.prefetch()
    everything: Tensor
    if type(companion) is _GrowingPowers:
        everything = companion.add(tokens)
    else:
        # the layer's second slot stays empty: a tensor without features
        everything = companion.update(tokens, tokens[..., :0])[0]
    return everything if everything.shape[2] == keys else everything[:, :, :keys]


def _newest(layer: Any, values: Tensor, new: int) -> Tensor:
    """The rows of ``values`` that belong to the newest tokens."""
    if _fills_from_the_front(layer):
        # where it stands is known on the device only
        rows = (layer.cumulative_length - new).view(1)
        if new > 1:
            rows = rows + torch.arange(new, device=values.device)
        return values.index_select(2, rows)
    return values.narrow(2, values.shape[2] - new, new)


def _fills_from_the_front(layer: Any) -> bool:
    """Whether a layer has room behind its newest tokens, as a static one has."""
    # the usual kind first: to ask for others is slow
    if type(layer) is DynamicLayer or not isinstance(layer, StaticLayer):
        return False
    if isinstance(layer, StaticSlidingWindowLayer):
        # once the window is full it slides, and the newest come last
        return bool(layer.cumulative_length_int <= layer.max_cache_len)
    return True


class _Follower:
    """A method of one cache layer that is done to its companions as well."""

    def __init__(self, layer: Any, name: str) -> None:
        self.layer = layer
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = getattr(type(self.layer), self.name)(self.layer, *args, **kwargs)
        for companions in self.layer.gfsa_powers.values():
            for companion in companions:
                getattr(companion, self.name)(*args, **kwargs)
        return result
