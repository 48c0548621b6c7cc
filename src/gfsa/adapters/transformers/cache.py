r"""The past of a decoded token in a cache of transformers: powers beside keys and values.

A layer of the cache gets companions, one for each power ``A^k·v`` that is needed again: cache
layers of its own kind, on which every operation on the layer is repeated (beams reordered, tokens
cropped, memory moved). Where several layers of a model attend to the keys and values of one
(Gemma 3n), each has companions of its own. In one tensor ``[V | U]``, ``torch.cat`` would copy U of
all tokens for every new one, and with grouped queries the decode kernel could not read U.

The powers must belong to the tokens in the layer, although another model may have used the cache in
between. Its length shows it where a layer grows; others count how often they were filled since
powers were added. A layer also remembers its keys and values until the next forward, because a
caller may assign or write rows. What a replayed CUDA graph adds is not noticed: no Python runs.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from gfsa.operators.call import is_exporting
from gfsa.plugs.checks.proof import name_of


class LayerPast:
    """What a layer of a cache holds after ``new`` tokens were added, and the companions beside it.

    ``owner`` is the index of the module that attends to it.
    """

    #: the length, where free rows follow the newest token
    length_on_device: Tensor | None = None

    def __init__(self, layer: Any, owner: int, new: int) -> None:
        self.layer = layer
        self.owner = owner
        self.new = new
        # the most common classes first, because isinstance is slow here
        kind = type(layer)
        if kind is StaticLayer:
            self.length_on_device = layer.cumulative_length
        elif kind is not DynamicLayer and isinstance(layer, StaticLayer):
            is_window = isinstance(layer, StaticSlidingWindowLayer)
            # once a window is full it slides, and the newest tokens are its last rows
            if not is_window or layer.cumulative_length_int <= layer.max_cache_len:
                self.length_on_device = layer.cumulative_length

    def newest(self, values: Tensor) -> Tensor:
        """The rows of ``values`` that belong to the new tokens."""
        length = self.length_on_device
        if length is None:
            return values.narrow(2, values.shape[2] - self.new, self.new)
        rows = (length - self.new).view(1)
        if self.new > 1:
            rows = rows + torch.arange(self.new, device=values.device)
        return values.index_select(2, rows)

    def power(self, k: int) -> Tensor | None:
        """``A^k·v`` of the tokens before, ``(B, H, rows, D)``, and free rows; None if unknown."""
        companions = getattr(self.layer, "gfsa_powers", {}).get(self.owner)
        return companions[k - 1].rows if companions else None

    def prepare(self, count: int, heads: tuple[int, ...]) -> None:
        """Raise unless ``count`` powers of these heads belong to the tokens before."""
        layer, owner = self.layer, self.owner
        # isinstance is slow here, and every decoded token asks
        if is_exporting() and isinstance(layer, StaticLayer):
            raise ValueError(
                "torch.export and torch.jit.trace cannot keep the powers of past tokens from call "
                "to call: a static cache has buffers for keys and values only. Export with "
                "use_cache=False, or plug filters of degree 1 (K=None), which need no such powers"
            )
        if not hasattr(layer, "gfsa_powers"):
            layer.gfsa_powers = {}
            for name in _REPEATED:
                if hasattr(layer, name):
                    setattr(layer, name, _RepeatedMethod(layer, name))
        companions: list[Any] | None = layer.gfsa_powers.get(owner)
        if companions is None:
            self._refuse_tokens_without_powers()
            companions = layer.gfsa_powers[owner] = [empty_like(layer) for _ in range(count)]
            companions[0].gfsa_heads = heads
            # of a layer that grows without a window, the length is enough
            if type(companions[0]) is not GrowingPowers:
                _count_fillings(layer, owner)
        elif len(companions) < count or companions[0].gfsa_heads != heads:
            raise ValueError(
                f"this cache was filled by a filter of degree {len(companions) + 1} with powers of "
                f"the heads {list(companions[0].gfsa_heads)}, the filter now has degree "
                f"{count + 1} and needs those of {list(heads)}; start from a new cache"
            )
        self._refuse_another(companions[:count])

    def write(self, k: int, rows: Tensor, keys: int) -> Tensor:
        """After :meth:`prepare`, append ``A^k·v`` of new tokens; the first ``keys`` rows of all."""
        every: Tensor = self.layer.gfsa_powers[self.owner][k - 1].add(rows, self.layer)
        return every if every.shape[2] == keys else every[:, :, :keys]

    def make_room(self, like: Tensor) -> Tensor:
        """The rows of ``A·v`` with one for the new token, ``like`` it, which the caller writes."""
        layer = self.layer
        companion = layer.gfsa_powers[self.owner][0]
        # few questions: every token comes here in each layer
        if type(companion) is not GrowingPowers or companion.length + 1 != layer.keys.shape[2]:
            self._refuse_another((companion,))
        return companion.make_room(like, layer)

    def counters(self, heads: int, device: torch.device) -> Tensor | None:
        """Zeros that the decode kernel may use and leaves at zero, if the layer keeps some."""
        layer = self.layer
        # the most common class first, because isinstance is slow here
        if type(layer) is DynamicLayer:
            return None
        companions = getattr(layer, "gfsa_powers", {}).get(self.owner)
        # a compiled call checks less of a companion, which is a module
        holder = companions[0] if companions else layer
        counters: Tensor | None = getattr(holder, "gfsa_counters", None)
        if counters is not None and len(counters) >= heads and counters.device == device:
            return counters
        if torch.compiler.is_compiling() or not isinstance(layer, StaticLayer):
            return None
        # while a graph is captured, they would be its memory
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        counters = holder.gfsa_counters = _new_counters(heads, device)
        return counters

    def _refuse_another(self, companions: Any) -> None:
        """Raise unless these companions belong to the tokens that the layer holds."""
        for companion in companions:
            if type(companion) is GrowingPowers:
                known = companion.length
            elif type(companion) is WindowPowers and not torch.compiler.is_compiling():
                known = companion.cumulative_length
            else:
                # the layer alone counts its tokens
                break
            if known + self.new != (held := self.layer.get_seq_length()):
                raise ValueError(
                    f"the cache holds {int(held) - self.new} earlier tokens, but the powers of "
                    f"{int(known)}: {_CAUSES}"
                )
        name = _fillings_for(self.owner)
        fillings = getattr(self.layer, name, None)
        if fillings not in (None, 1):
            raise ValueError(f"the cache holds tokens without their powers: {_CAUSES}")
        if fillings is not None:
            setattr(self.layer, name, 0)

    def _refuse_tokens_without_powers(self) -> None:
        # a tensor if the device counts the tokens
        held = self.layer.get_seq_length()
        if isinstance(held, Tensor) and torch.compiler.is_compiling():
            # a compiled graph cannot read what is on the device, but can check it there
            if held.device.type in ("cpu", "cuda"):
                torch._assert_async(held == self.new, f"the static cache holds tokens {_NO_POWERS}")
        elif held > self.new:
            raise ValueError(f"the cache holds {int(held - self.new)} tokens {_NO_POWERS}")


_NO_POWERS = (
    "without the powers of attention that the filter needs: it was filled by prefix tuning, by an "
    "unplugged model or while training, or was rebuilt from its keys and values alone, as "
    "torch.export does. Start from a new cache (prefix tuning cannot be combined with a filter: "
    "its prefix has keys but no queries)"
)

_CAUSES = (
    "an unplugged model has used it in between, or the layer attends more than once per forward. "
    "Start from a new cache, or pass use_cache=False"
)


# free rows that a growing layer has after it was copied: by their bytes, so that all layers of a
# model together hardly need more memory than its tokens
_MOST_FREE = 16
_FEWEST_FREE = 3
_FREE_BYTES = 20 * 1024


class GrowingPowers(DynamicLayer):
    """Powers in a layer that grows, into free rows after its tokens.

    Every companion has ``rows``, free ones too. ``add`` appends the newest and returns all;
    ``make_room`` returns rows with one for the newest, which the caller writes.

    Where gradients are recorded or a graph is traced, ``torch.cat`` copies the rows for each token:
    autograd may hold them, so they are not written again.
    """

    # transformers registers a class by it, for caches that it builds itself
    _layer_type = None

    def __init__(self) -> None:
        # what the base class sets, but not by the property's setter, which a compiler does not know
        self.rows: Tensor | None = None
        # whether this layer allocated the rows to write into them, so that no graph holds them
        self._is_writable = False
        self.length = 0
        self.values: Tensor | None = None
        self.is_initialized = False

    # transformers reads and replaces ``keys`` where it reorders, selects, repeats or moves them
    @property
    def keys(self) -> Any:
        rows = self.rows
        if rows is None or rows.shape[2] == self.length:
            return rows
        return rows.narrow(2, 0, self.length)

    @keys.setter
    def keys(self, rows: Tensor | None) -> None:
        self.rows, self._is_writable = rows, False
        self.length = 0 if rows is None else rows.shape[2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rows, self._is_writable, self.length = key_states[:, :, :0], False, 0
        # no view of the tokens, which would keep their memory
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, *args: Any, **kwargs: Any) -> None:
        rows, is_writable = self.rows, self._is_writable
        if len(args) == 1 and not kwargs and args[0] < 0:
            self.length = max(0, self.length + args[0])
            return
        super().crop(*args, **kwargs)
        # the tokens that are left have the first rows
        self.rows, self._is_writable = rows, is_writable

    def prefetch(self) -> None:
        if self.rows is not None and self.rows.device != self.device:
            super().prefetch()

    def add(self, tokens: Tensor, layer: Any) -> Tensor:
        # an offloading cache has moved the rows to the CPU together with the keys
        self.prefetch()
        if not self.is_initialized:
            self.lazy_initialization(tokens, tokens[..., :0])
        assert self.rows is not None
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        in_place = type(tokens) is Tensor and tokens.dtype == self.rows.dtype
        if not in_place or torch.is_grad_enabled() or is_traced:
            # not by the property's setter, which a compiler does not know; the first tokens need no
            # copy, since nothing is written into them
            self.rows = torch.cat([self.keys, tokens], dim=2) if self.length else tokens
            self._is_writable = False
            self.length = self.rows.shape[2]
            return self.rows
        new, length = tokens.shape[2], self.length
        rows = self._with_room(new, tokens)
        rows.narrow(2, length, new).copy_(tokens)
        self.length = length + new
        return rows.narrow(2, 0, length + new)

    def make_room(self, like: Tensor, layer: Any) -> Tensor:
        # a kernel's write is nothing that autograd would have to know
        if type(like) is not Tensor or torch.compiler.is_compiling():
            return self.add(torch.empty_like(like), layer)
        if self.rows is None or self.rows.device != like.device:
            self.prefetch()
        rows = self._with_room(1, like)
        self.length += 1
        return rows

    def _with_room(self, new: int, like: Tensor) -> Tensor:
        rows, length = self.rows, self.length
        assert rows is not None
        needed = length + new
        # cropped to less than half, it gives the memory back, as torch.cat would
        fits = self._is_writable and needed <= rows.shape[2] <= 2 * needed + _MOST_FREE
        # rows of inference mode cannot be written outside of it
        if fits and (torch.is_inference_mode_enabled() or not rows.is_inference()):
            return rows
        batch, heads, _, dim = like.shape
        row = batch * heads * dim * like.element_size()
        free = min(_MOST_FREE, max(_FEWEST_FREE, _FREE_BYTES // max(row, 1)))
        other = like.new_empty((batch, heads, needed + free, dim))
        other.narrow(2, 0, length).copy_(self.keys)
        self.rows, self._is_writable = other, True
        return other


class WindowPowers(DynamicSlidingWindowLayer):
    """Powers in a window that grows."""

    _layer_type = None
    rows = property(lambda self: self.keys)

    def add(self, tokens: Tensor, layer: Any) -> Tensor:
        self.prefetch()
        if torch.compiler.is_compiling():
            self.cumulative_length = layer.cumulative_length - tokens.shape[2]
        # the slot for values gets a tensor without features
        return self.update(tokens, tokens[..., :0])[0]

    def make_room(self, like: Tensor, layer: Any) -> Tensor:
        return self.add(like.new_empty(like.shape), layer)


class TracedStaticPowers(StaticLayer):
    """Powers in a static buffer; if it ``slides``, a window whose rows move once it is full.

    The layer of the cache alone counts its tokens: a compiled call is given one tensor less.
    """

    _layer_type = None
    rows = property(lambda self: self.keys)

    gfsa_counters: Tensor | None = None

    def __init__(self, max_cache_len: int, slides: bool = False) -> None:
        super().__init__(max_cache_len)
        self.slides = slides

    def get_seq_length(self) -> int:
        return self.max_cache_len if self.is_initialized else 0

    def add(self, tokens: Tensor, layer: Any) -> Tensor:
        if not self.is_initialized:
            self.lazy_initialization(tokens, tokens[..., :0])
        rows, new, most = self._rows_beside(layer), tokens.shape[2], self.max_cache_len
        if self.slides and layer.cumulative_length_int > most:
            before = layer.cumulative_length_int - new
            past = rows[:, :, 1:] if before >= most else rows[:, :, :before]
            every = torch.cat([past, tokens], dim=2) if before else tokens
            rows.copy_(every[:, :, -most:])
            return every
        length = layer.cumulative_length
        position = torch.arange(new, device=length.device) + (length - new)
        try:
            rows.index_copy_(2, position, tokens)
        except NotImplementedError:
            # on a device without it, such as mps
            rows[:, :, position] = tokens
        return rows

    def make_room(self, like: Tensor, layer: Any) -> Tensor:
        rows = self._rows_beside(layer)
        if self.slides and layer.cumulative_length_int > self.max_cache_len:
            # rows move now, as those of keys and values have done
            rows.copy_(rows.roll(-1, dims=2))
        return rows

    def _rows_beside(self, layer: Any) -> Tensor:
        rows: Any = self.keys
        # an offloading cache has moved them to the CPU together with the keys, but no length
        if rows.device != layer.cumulative_length.device:
            self.prefetch()
            rows = self.keys
        return rows


class StaticPowers(TracedStaticPowers, nn.Module):
    """:class:`TracedStaticPowers` as a module, of which a compiled call checks less.

    Torch skips the checks of a module whose attributes (tensors, numbers, names) are the objects of
    the last call; the attributes of other objects are checked one by one.
    """

    def __init__(self, max_cache_len: int, slides: bool = False) -> None:
        nn.Module.__init__(self)
        TracedStaticPowers.__init__(self, max_cache_len, slides)


def _new_counters(heads: int, device: torch.device | str) -> Tensor:
    counters = torch.zeros(heads, dtype=torch.int32, device=device)
    # as the layer's own tensors: a graph that writes to it can be captured
    torch._dynamo.mark_static_address(counters)
    return counters


# layers that also keep the state of a recurrent mixer in the same block (Falcon-H1, Zamba), or the
# keys of an indexer (DeepSeek-V3.2); by name, because older transformers lack some of them
_ATTENTION_PART: dict[str, type[Any]] = {
    "DynamicIndexedLayer": DynamicLayer,
    "LinearAttentionAndFullAttentionLayer": DynamicLayer,
    "LinearAttentionAndSlidingWindowAttentionLayer": DynamicSlidingWindowLayer,
    "LinearAttentionAndStaticFullAttentionLayer": StaticLayer,
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": StaticSlidingWindowLayer,
    "StaticIndexedLayer": StaticLayer,
}


def empty_like(layer: Any) -> Any:
    """An empty cache layer of the same kind, for one power."""
    kind = _ATTENTION_PART.get(type(layer).__name__, type(layer))
    if kind is DynamicLayer:
        return GrowingPowers()
    if kind is DynamicSlidingWindowLayer:
        companion = WindowPowers(sliding_window=layer.sliding_window)
        companion.record_past = layer.record_past
        return companion
    if kind is StaticLayer or kind is StaticSlidingWindowLayer:
        # a graph that is traced cannot make a module
        made = TracedStaticPowers if torch.compiler.is_compiling() else StaticPowers
        # the length of a window is already the smaller of the window and the cache's length
        return made(layer.max_cache_len, slides=kind is StaticSlidingWindowLayer)
    raise TypeError(
        f"a plugged model cannot decode with a {kind.__name__} in its cache; use a dynamic or "
        "static cache (with or without a sliding window), or use_cache=False"
    )


# the methods of a cache layer, besides those that fill it, that companions repeat
_REPEATED = (
    *("activate_past_recording", "batch_repeat_interleave", "batch_select_indices", "crop"),
    *("offload", "prefetch", "reorder_cache", "reset"),
)


class _RepeatedMethod:
    """A method of one cache layer that is also called on its companions."""

    def __init__(self, layer: Any, name: str) -> None:
        self.layer = layer
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, name = self.layer, self.name
        compiling = torch.compiler.is_compiling()
        if name != "reset" and not compiling:
            refuse_other_rows(layer)
        result = getattr(type(layer), name)(layer, *args, **kwargs)
        for companion in itertools.chain(*layer.gfsa_powers.values()):
            # what only the state beside keys and values needs, a companion does not have
            if hasattr(companion, name):
                getattr(companion, name)(*args, **kwargs)
        if name == "reset":
            # there is no past to which powers could fail to belong
            for counted in getattr(layer.__dict__.get("update"), "counted", ()):
                setattr(layer, counted, 0)
        if not compiling:
            layer.gfsa_rows = HeldRows(layer)
        return result


def refuse_other_rows(layer: Any) -> None:
    """Raise if keys or values of a layer were assigned or written since it was last looked at."""
    rows: HeldRows | None = layer.__dict__.get("gfsa_rows")
    if rows is not None and rows.were_changed_in(layer):
        raise ValueError(
            "keys or values in a layer of the cache were assigned or written after a plugged model "
            "used it: the powers of attention beside them are those of the rows before. Reorder, "
            "select, repeat and crop rows by the cache's own methods, or start from a new cache"
        )


class HeldRows:
    """The keys and values that a layer of a cache holds, and how often they were written.

    A layer gets it as ``gfsa_rows`` when powers were added or its rows have moved. Not while a
    model is compiled: the graph would check all that is read here, for every token.
    """

    def __init__(self, layer: Any) -> None:
        self.keys, self.values = layer.keys, layer.values
        self.filled, self.versions = _state(layer)

    def __getstate__(self) -> dict[str, Any]:
        # copies of tensors count their changes anew
        return {**self.__dict__, "versions": None}

    def were_changed_in(self, layer: Any) -> bool:
        filled, versions = _state(layer)
        same = self.keys is layer.keys and self.values is layer.values
        if same and (self.versions is None or self.versions == versions):
            return False
        # else by a compiled call, or by another model, which the lengths show
        return self.filled == filled


def _state(layer: Any) -> tuple[int, tuple[int, int] | None]:
    """A number that changes when tokens are added, and how often keys and values were written."""
    # a layer that is reset may drop its rows; a quantised one begins with keys of no dimension
    if layer.keys is None or layer.keys.ndim < 2:
        return 0, None
    filled = layer.__dict__.get("cumulative_length", layer.keys.shape[-2])
    # tensors of inference mode do not count how often they are written
    try:
        filled = filled if type(filled) is int else filled._version
    except RuntimeError:
        filled = 0
    try:
        return filled, (layer.keys._version, layer.values._version)
    except RuntimeError:
        return filled, None


def _count_fillings(layer: Any, owner: int) -> None:
    """Count from now on how often a layer, just filled, is filled before powers are added."""
    update = layer.__dict__.get("update")
    if not isinstance(update, _TracedUpdate):
        # a graph that is traced cannot make a module
        kind = _TracedUpdate if torch.compiler.is_compiling() else _CountedUpdate
        update = layer.update = kind(layer)
    name = _fillings_for(owner)
    update.counted = (*update.counted, name)
    setattr(layer, name, 1)


def _fillings_for(owner: int) -> str:
    """The attribute of a layer that counts how often it was filled since a module added powers."""
    # not a dict of them: after a compiled call an attribute is set much faster than a dict is
    return f"gfsa_fillings_{owner}"


class _TracedUpdate:
    """``update`` of one cache layer, which counts its calls for each module; up to two."""

    counted: tuple[str, ...] = ()

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        for name in self.counted:
            # once or more often: a number that grows would be compiled again and again
            setattr(layer, name, 2 if getattr(layer, name) else 1)
        return type(layer).update(layer, *args, **kwargs)


class _CountedUpdate(_TracedUpdate, nn.Module):
    """:class:`_TracedUpdate` as a module, as :class:`StaticPowers` is one."""

    def __init__(self, layer: Any) -> None:
        nn.Module.__init__(self)
        _TracedUpdate.__init__(self, layer)


def layer_in(cache: Any, index: int | None, module: Any) -> Any:
    """The layer of a cache that a module attends to; ``index`` is that of the one that it fills."""
    # the most common classes first, because isinstance is slow here
    if type(cache) is not DynamicCache and type(cache) is not StaticCache:
        cache = _of_self_attention(cache)
    if index is None:
        raise ValueError(
            f"{name_of(module)} does not say which layer of the cache it uses (its layer_idx is "
            "None), so the powers of past tokens have no place. Pass use_cache=False"
        )
    # decided when the module was plugged
    source = module._gfsa_arguments.source
    source = index if source is None else source
    if not 0 <= source < len(cache.layers):
        raise ValueError(
            f"layer {index} ({name_of(module)}) has no layer of its own in the cache: it uses the "
            "keys and values of another layer. Pass use_cache=False"
        )
    return cache.layers[source]


def _of_self_attention(cache: Any) -> Any:
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        raise TypeError(
            f"a plugged model decodes with a transformers Cache, got {type(cache).__name__}; "
            "pass use_cache=False, or a DynamicCache or StaticCache"
        )
    return cache


def source_of(module: Any) -> int | None:
    """The layer whose keys and values a module uses, -1 if unknown; None if it has its own.

    The config lists it (Mistral Large 4), or it is the last of its type with its own.
    """
    if not getattr(module, "is_kv_shared_layer", False):
        return None
    config, index = module.config, module.layer_idx
    if getattr(config, "kv_source_layers", None) is not None:
        return int(config.kv_source_layers[index])
    kinds = config.layer_types
    own = kinds[: len(kinds) - config.num_kv_shared_layers]
    return max((i for i, kind in enumerate(own) if kind == kinds[index]), default=-1)


def mix_into(cache: Any, index: int | None, module: Any) -> None:
    """Let a cache keep ``V + r·V⁰`` in place of V, so that no V⁰ of past tokens is needed."""
    if index is None or module._gfsa_arguments.source is not None:
        return
    cache = _of_self_attention(cache)
    update = cache.__dict__.get("update")
    if not isinstance(update, _MixedUpdate):
        update = cache.update = _MixedUpdate(cache)
    known = update.filters.get(index)
    has_no_term = index not in update.filters and module.gfsa.has_depth
    if has_no_term and not torch.compiler.is_compiling():
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
        self.filters: dict[int, weakref.ref[Any] | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        # references cannot be pickled; the next forward sets them again
        return {"cache": self.cache, "filters": dict.fromkeys(self.filters)}

    def __call__(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        known = self.filters.get(layer_idx)
        filter = None if known is None else known()
        if filter is not None:
            values = filter.mix_values(values)
        return type(self.cache).update(self.cache, keys, values, layer_idx, *args, **kwargs)
