"""Exact decoding with a cache: powers of past tokens are cached beside their keys and values.

In causal attention a past token never sees a later one, so ``A·v, A²·v, …`` of past tokens do not
change when a token is added. A layer of a transformers cache therefore gets companions: further
cache layers of its own kind, one for each power that is needed again, that hold ``A^k·v`` in the
rows in which the layer holds keys and values. Every operation on the layer (beams reordered,
tokens cropped, a sliding window, a static buffer) is applied to its companions as well.

In some models late layers attend to the keys and values of an earlier layer (Gemma 3n). Each of
them has its own map and its own powers: the one cache layer has companions for each of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
)

from gfsa.adapters.transformers.companions import (
    GrowingPowers,
    append,
    counters_beside,
    counts_its_tokens,
    empty_like,
)
from gfsa.adapters.transformers.one_launch import (
    decode_in_one_launch,
    fills_from_the_front,
)
from gfsa.adapters.transformers.past_check import (
    forget_fillings,
    refuse_another_past,
    refuse_other_rows,
    remember_rows,
    watch,
)
from gfsa.adapters.transformers.refusals import name_of
from gfsa.operators import AttentionOperator, Coefficients, Operator, SDPAOperator, Visibility
from gfsa.operators.base import combine, own_share, value_of
from gfsa.operators.call import is_exporting

# the methods of a cache layer, besides those that fill it, that companions repeat
_REPEATED = (
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "crop",
    "offload",
    "prefetch",
    "reorder_cache",
    "reset",
)


_NO_POWERS = (
    "without the powers of attention that the filter needs: it was filled by prefix tuning, by an "
    "unplugged model or while training, or was rebuilt from its keys and values alone, as "
    "torch.export does. Start from a new cache (prefix tuning cannot be combined with a filter: "
    "its prefix has keys but no queries)"
)


class CachedOperator(Operator):
    r"""The rows of A for the newest tokens, with the cached powers of all earlier tokens.

    .. math:: (A^{k+1} v)_{new} = A_{new}\,[(A^k v)_{past};\,(A^k v)_{new}]

    Args:
        rows: an operator whose ``apply`` takes all tokens and returns the new ones.
        layer: of the cache, after the new keys and values were added to it.
        owner: the index of the module that attends to it.
        new: how many tokens are new.
        heads: query heads.
        keys: how many rows of the cache ``rows`` attends to.
    """

    #: of the entries of H: dropout acts on those of A, which ``rows`` drops
    dropout_p = 0.0

    def __init__(
        self, rows: Operator, layer: Any, owner: int, new: int, heads: int, keys: int
    ) -> None:
        self.rows = rows
        self.layer = layer
        self.owner = owner
        self.new = new
        self.heads = heads
        self.keys = keys

    def apply(self, x: Tensor) -> Tensor:
        return self.rows.apply(x)

    def polynomial(
        self, coeffs: Tensor | Coefficients, v: Tensor, exclusive: Tensor | None = None
    ) -> Tensor:
        if exclusive is not None:
            return super().polynomial(coeffs, v, exclusive)
        # not by isinstance, which is slow here
        numbers: Any = coeffs.base if type(coeffs) is Coefficients else coeffs
        degree = numbers.shape[-1] - 1
        if self.new == 1 and type(self.rows) is SDPAOperator:
            companion = _first_companion(self.layer, self.owner) if degree > 1 else None
            # a filter of degree 1 needs no powers of the tokens before
            if degree == 1 or companion is not None:
                y = decode_in_one_launch(
                    self.rows.given, self.layer, self.owner, companion, coeffs, v
                )
                if y is not None:
                    return y
        elif degree == 1 and not torch.compiler.is_compiling():
            # for the tokens after a prompt: a compiled step finds them, and cannot make them
            counters_beside(self.layer, v.shape[0] * self.heads, v.device)
        coeffs = value_of(coeffs)
        powers = self.powers(v, degree)
        # for one token the cost is in kernel launches, not in arithmetic
        plain = type(v) is Tensor and not torch.is_grad_enabled()
        return combine(coeffs, powers, in_one_go=plain and not torch.compiler.is_compiling())

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        newest = _newest(self.layer, v, self.new)
        if newest.shape[1] != self.heads:
            newest = newest.repeat_interleave(self.heads // newest.shape[1], dim=1)
        if degree == 0:
            return [newest]
        tokens = [newest, self.rows.apply(v)]
        if degree > 1:
            all_heads = tuple(range(self.heads))
            companions = _companions(self.layer, self.owner, degree - 1, self.new, all_heads)
            for companion in companions[: degree - 1]:
                all_tokens = append(companion, tokens[-1], self.layer, self.keys)
                tokens.append(self.rows.apply(all_tokens))
        return tokens

    def filter(self, coeffs: Tensor, exclusive: Tensor | None, v: Tensor) -> Tensor:
        """The rows of ``H = c0·I + c1·A − diag(a·p)`` for new tokens, ``(B, H, new, keys)``."""
        rows = self.rows
        if isinstance(rows, SDPAOperator):
            q = rows.given.q
            identity = torch.eye(self.keys, dtype=q.dtype, device=q.device)
            a = rows.apply(identity.expand(*q.shape[:2], -1, -1))
        else:
            a = rows.dense()
            identity = torch.eye(self.keys, dtype=a.dtype, device=a.device)
        own = _newest(self.layer, identity[None, None], self.new)
        matrix = combine(coeffs, [own, a])
        if exclusive is None:
            return matrix
        tokens, mixed = self.powers(v, 1)
        return matrix - (own_share(exclusive, mixed, tokens) * own).to(matrix.dtype)

    def whole(self) -> Operator:
        return self.rows

    def visibility(self) -> Visibility | None:
        return self.rows.visibility()

    def second_pass(self, heads: Sequence[int]) -> Operator | None:
        if isinstance(self.rows, AttentionOperator):
            # in every call, since the cache keeps powers of the same heads for all tokens
            rows: Operator | None = self.rows.of_heads(heads)
        else:
            rows = self.rows.second_pass(heads)
        return None if rows is None else _FurtherPowers(rows, self, heads)


class _FurtherPowers(Operator):
    """The second and further passes of some heads: the cache keeps powers for these heads only."""

    def __init__(self, rows: Operator, first: CachedOperator, heads: Sequence[int]) -> None:
        self.rows = rows
        self.first = first
        self.heads = tuple(heads)

    def apply(self, x: Tensor) -> Tensor:
        return self.rows.apply(x)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        tokens = [v]
        first = self.first
        companions = _companions(first.layer, first.owner, degree, first.new, self.heads)
        for companion in companions[:degree]:
            all_tokens = append(companion, tokens[-1], first.layer, first.keys)
            tokens.append(self.rows.apply(all_tokens))
        return tokens


def layer_in(cache: Any, index: int | None, module: Any) -> Any:
    """The cache layer that a module attends to; raises for caches that cannot hold powers.

    Args:
        cache: as the module got it.
        index: the layer of the cache that the module fills.
        module: the attention module.
    """
    # the most common classes first, because isinstance is slow here
    if type(cache) is not DynamicCache and type(cache) is not StaticCache:
        cache = _of_self_attention(cache)
    if index is None:
        raise ValueError(
            f"{name_of(module)} does not say which layer of the cache it uses (its layer_idx is "
            "None), so the powers of past tokens have no place. Pass use_cache=False"
        )
    source = _source_of(module) if _shares(module) else index
    if source is None or source >= len(cache.layers):
        raise ValueError(
            f"layer {index} ({name_of(module)}) has no layer of its own in the cache: it uses the "
            "keys and values of another layer. Pass use_cache=False"
        )
    return cache.layers[source]


def mix_into(cache: Any, index: int | None, module: Any) -> None:
    """Let a cache keep ``V + r·V⁰`` of a module with a depth term, in place of V.

    The cache then holds what the module attends to, so nothing of V⁰ is needed for past tokens.
    """
    if index is None or _shares(module):
        return
    cache = _of_self_attention(cache)
    update = cache.__dict__.get("update")
    if not isinstance(update, _MixedUpdate):
        update = cache.update = _MixedUpdate(cache)
    known = update.filters.get(index)
    if known is None and module.gfsa.has_depth and not torch.compiler.is_compiling():
        held = cache.get_seq_length(index)
        # a length on the GPU is not waited for
        if not (isinstance(held, Tensor) and held.is_cuda) and int(held) > 0:
            raise ValueError(
                f"the cache holds {int(held)} tokens that {name_of(module)} did not add, so its "
                "depth term is missing in their values: start from a new cache, or pass "
                "use_cache=False"
            )
    if known is None or known() is not module.gfsa:
        update.filters[index] = weakref.ref(module.gfsa)


class _MixedUpdate:
    """``update`` of one cache, which mixes new values with the first layer's."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.filters: dict[int, weakref.ref[Any]] = {}

    def __call__(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        known = self.filters.get(layer_idx)
        filter = None if known is None else known()
        if filter is not None:
            values = filter.mix_values(values)
        return type(self.cache).update(self.cache, keys, values, layer_idx, *args, **kwargs)


def _shares(module: Any) -> bool:
    """Whether a module uses the keys and values of another layer."""
    # a compiled call that has read __dict__ itself checks all that is in it, for every token
    if torch.compiler.is_compiling():
        return bool(getattr(module, "is_kv_shared_layer", False))
    # a module's own getattr is slow for what it lacks
    if hasattr(type(module), "is_kv_shared_layer"):
        return bool(module.is_kv_shared_layer)
    return bool(module.__dict__.get("is_kv_shared_layer", False))


def _of_self_attention(cache: Any) -> Any:
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        raise TypeError(
            f"a plugged model decodes with a transformers Cache, got {type(cache).__name__}; "
            "pass use_cache=False, or a DynamicCache or StaticCache"
        )
    return cache


def _source_of(module: Any) -> int | None:
    """The layer whose keys and values a sharing layer uses.

    The config lists it (Mistral Large 4), or it is the last of its type with its own.
    """
    listed = getattr(module.config, "kv_source_layers", None)
    if listed is not None:
        source: int = listed[module.layer_idx]
        return source
    kinds = module.config.layer_types
    own = len(kinds) - module.config.num_kv_shared_layers
    alike = [i for i, kind in enumerate(kinds[:own]) if kind == kinds[module.layer_idx]]
    return alike[-1] if alike else None


def _first_companion(layer: Any, owner: int) -> Any:
    """The companion for ``A·v`` of the tokens before; None if nothing was kept of them."""
    companions = getattr(layer, "gfsa_powers", {}).get(owner)
    return companions[0] if companions and companions[0].is_initialized else None


def _companions(layer: Any, owner: int, count: int, new: int, heads: tuple[int, ...]) -> list[Any]:
    """The companions of one module, to which the caller adds the powers of the newest tokens.

    Args:
        heads: which of the module's heads have powers.
    """
    if count < 1:
        return []
    _refuse_export_of_static(layer)
    if not hasattr(layer, "gfsa_powers"):
        layer.gfsa_powers = {}
        for name in _REPEATED:
            if hasattr(layer, name):
                setattr(layer, name, _RepeatedMethod(layer, name))
    companions: list[Any] | None = layer.gfsa_powers.get(owner)
    if companions is None:
        _refuse_a_past_without_powers(layer, new)
        companions = layer.gfsa_powers[owner] = [empty_like(layer) for _ in range(count)]
        companions[0].gfsa_heads = heads
        # a layer that grows without a window has lengths that tell everything
        if type(companions[0]) is not GrowingPowers:
            watch(layer, owner)
    elif len(companions) < count:
        raise ValueError(
            f"this cache was filled by a filter of degree {len(companions) + 1}, the filter now "
            f"has degree {count + 1}; start from a new cache"
        )
    elif companions[0].gfsa_heads != heads:
        raise ValueError(
            f"this cache keeps powers of the heads {list(companions[0].gfsa_heads)}, the filter "
            f"now needs those of {list(heads)}; start from a new cache"
        )
    counting = [each for each in companions[:count] if counts_its_tokens(each)]
    refuse_another_past(layer, owner, counting, new)
    return companions


def _refuse_a_past_without_powers(layer: Any, new: int) -> None:
    held = layer.get_seq_length()
    if isinstance(held, Tensor) and torch.compiler.is_compiling():
        # a compiled graph cannot read what is on the device, but can check it there
        if held.device.type in ("cpu", "cuda"):
            torch._assert_async(held == new, f"the static cache holds tokens {_NO_POWERS}")
        return
    past = held - new
    if past > 0:
        raise ValueError(f"the cache holds {int(past)} tokens {_NO_POWERS}")


def _refuse_export_of_static(layer: Any) -> None:
    """Raise where a graph is exported that would forget the powers after each call."""
    # isinstance is slow here, and every decoded token asks
    if is_exporting() and isinstance(layer, StaticLayer):
        raise ValueError(
            "torch.export and torch.jit.trace cannot keep the powers of past tokens from call to "
            "call: a static cache has buffers for keys and values only. Export with "
            "use_cache=False, or plug filters of degree 1 (K=None), which need no such powers"
        )


def _newest(layer: Any, values: Tensor, new: int) -> Tensor:
    """The rows of ``values`` that belong to the newest tokens."""
    if fills_from_the_front(layer):
        # the current length is known on the device only
        rows = (layer.cumulative_length - new).view(1)
        if new > 1:
            rows = rows + torch.arange(new, device=values.device)
        return values.index_select(2, rows)
    return values.narrow(2, values.shape[2] - new, new)


class _RepeatedMethod:
    """A method of one cache layer that is also called on its companions."""

    def __init__(self, layer: Any, name: str) -> None:
        self.layer = layer
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        if self.name != "reset" and not compiling:
            refuse_other_rows(self.layer)
        result = getattr(type(self.layer), self.name)(self.layer, *args, **kwargs)
        for companions in self.layer.gfsa_powers.values():
            for companion in companions:
                # what only the state beside keys and values needs, a companion does not have
                if hasattr(companion, self.name):
                    getattr(companion, self.name)(*args, **kwargs)
        if self.name == "reset":
            forget_fillings(self.layer)
        if not compiling:
            remember_rows(self.layer)
        return result
