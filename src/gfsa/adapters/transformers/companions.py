"""Layers of a cache that hold one power ``A^k·v`` of each token, beside its keys and values.

They are cache layers of transformers that use their slot for keys only. A caller appends tokens
(:func:`append`), or makes room for one and writes its row itself (:func:`room_for_one`), as the
kernel for a decoded token does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

# free rows that a growing layer has after it was copied: by their bytes, so that all layers of a
# model together hardly need more memory than its tokens (12 layers of GPT-2, 16 sequences: 0.84
# MiB). Keys and values, of which there is twice as much, are copied for every token
_MOST_FREE = 16
_FEWEST_FREE = 3
_FREE_BYTES = 20 * 1024


class GrowingPowers(DynamicLayer):
    """A layer that grows like a dynamic one, into free rows after its tokens.

    ``torch.cat`` would copy all rows for each new token. Where gradients are recorded or a graph is
    traced, it does: autograd may hold such rows, and they are not written again, cropped or not.
    """

    # transformers registers a class by it, for caches that it builds itself
    _layer_type = None

    def __init__(self) -> None:
        # what the base class sets, but not by the property's setter, which a compiler does not know
        self._rows: Tensor | None = None
        # whether this layer allocated the rows to write into them, so that no graph holds them
        self._is_writable = False
        self.length = 0
        self.values: Tensor | None = None
        self.is_initialized = False

    # transformers reads and replaces ``keys`` where it reorders, selects, repeats or moves them
    @property
    def keys(self) -> Any:
        rows = self._rows
        if rows is None or rows.shape[2] == self.length:
            return rows
        return rows.narrow(2, 0, self.length)

    @keys.setter
    def keys(self, rows: Tensor | None) -> None:
        self._rows, self._is_writable = rows, False
        self.length = 0 if rows is None else rows.shape[2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._rows, self._is_writable, self.length = key_states[:, :, :0], False, 0
        # no view of the tokens, which would keep their memory
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, *args: Any, **kwargs: Any) -> None:
        rows, is_writable = self._rows, self._is_writable
        if len(args) == 1 and not kwargs and args[0] < 0:
            self.length = max(0, self.length + args[0])
            return
        super().crop(*args, **kwargs)
        # the tokens that are left have the first rows
        self._rows, self._is_writable = rows, is_writable

    def prefetch(self) -> None:
        if self._rows is not None and self._rows.device != self.device:
            super().prefetch()

    def add(self, tokens: Tensor) -> Tensor:
        """Append the newest tokens; returns all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(tokens, tokens[..., :0])
        assert self._rows is not None
        if not _can_be_written(tokens) or tokens.dtype != self._rows.dtype:
            # not by the property's setter, which a compiler does not know; the first tokens need no
            # copy, since nothing is written into them
            self._rows = torch.cat([self.keys, tokens], dim=2) if self.length else tokens
            self._is_writable = False
            self.length = self._rows.shape[2]
            return self._rows
        new, length = tokens.shape[2], self.length
        rows = self._with_room(new, tokens)
        rows.narrow(2, length, new).copy_(tokens)
        self.length = length + new
        return rows.narrow(2, 0, length + new)

    def room_for_one(self, like: Tensor) -> Tensor:
        """Count one more token, whose row the caller writes; returns the rows, free ones too.

        Args:
            like: ``(B, H, 1, D)``, what such a row is like.
        """
        # a kernel's write is nothing that autograd would have to know
        if type(like) is not Tensor or torch.compiler.is_compiling():
            return self.add(torch.empty_like(like))
        rows = self._with_room(1, like)
        self.length += 1
        return rows

    def _with_room(self, new: int, like: Tensor) -> Tensor:
        rows, length = self._rows, self.length
        assert rows is not None
        needed = length + new
        if (
            self._is_writable
            # cropped to less than half, it gives the memory back, as torch.cat would
            and needed <= rows.shape[2] <= 2 * needed + _MOST_FREE
            # rows of inference mode cannot be written outside of it
            and (torch.is_inference_mode_enabled() or not rows.is_inference())
        ):
            return rows
        batch, heads, _, dim = like.shape
        row = batch * heads * dim * like.element_size()
        free = min(_MOST_FREE, max(_FEWEST_FREE, _FREE_BYTES // max(row, 1)))
        other = like.new_empty((batch, heads, needed + free, dim))
        other.narrow(2, 0, length).copy_(self.keys)
        self._rows, self._is_writable = other, True
        return other


class TracedStaticPowers(StaticLayer):
    """A static layer, with the counters that the kernel for a decoded token leaves at zero.

    It has no number of its tokens (:func:`counts_its_tokens`): the methods that add tokens get the
    layer of the cache, which has counted them. A compiled call has one tensor less to be given.
    """

    _layer_type = None

    counters: Tensor | None = None

    def add(self, tokens: Tensor, layer: Any) -> Tensor:
        """Append the newest tokens; returns all rows."""
        if not self.is_initialized:
            self.lazy_initialization(tokens, tokens[..., :0])
        rows, new, length = self._rows_beside(layer), tokens.shape[2], layer.cumulative_length
        _write(rows, torch.arange(new, device=length.device) + (length - new), tokens)
        return rows

    def room_for_one(self, layer: Any) -> Tensor:
        """The rows, of which the caller writes the newest token's."""
        return self._rows_beside(layer)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if key_states.is_cuda and not torch.compiler.is_compiling():
            self.counters = _new_counters(key_states.shape[0] * key_states.shape[1], self.device)

    def get_seq_length(self) -> int:
        """How many rows there are: the layer of the cache knows which of them are filled."""
        return self.max_cache_len if self.is_initialized else 0

    def _rows_beside(self, layer: Any) -> Tensor:
        rows: Any = self.keys
        # an offloading cache has moved them to the CPU together with the keys, but no length
        if rows.device != layer.cumulative_length.device:
            self.prefetch()
            rows = self.keys
        return rows


class StaticPowers(TracedStaticPowers, nn.Module):
    """:class:`TracedStaticPowers` as a module, because of what a compiled call checks each time.

    Torch skips those of a module whose attributes are the same objects as in the last call, if they
    are tensors, numbers or names; the attributes of any other object are checked one by one. (A
    device is none of these, so a forward asks the layer's length for its device, which it never
    leaves.)
    """

    def __init__(self, max_cache_len: int) -> None:
        nn.Module.__init__(self)
        StaticLayer.__init__(self, max_cache_len)


class TracedStaticWindowPowers(TracedStaticPowers):
    """A static window, whose rows move once it is full."""

    def add(self, tokens: Tensor, layer: Any) -> Tensor:
        """As :meth:`TracedStaticPowers.add`; several new ones with those outside the window."""
        new, most = tokens.shape[2], self.max_cache_len
        before = layer.cumulative_length_int - new
        if before + new <= most:
            return TracedStaticPowers.add(self, tokens, layer)
        if not self.is_initialized:
            self.lazy_initialization(tokens, tokens[..., :0])
        if before >= most and new == 1:
            rows = self.room_for_one(layer)
            _write(rows, torch.tensor([most - 1], device=rows.device), tokens)
            return rows
        rows, every = self._rows_beside(layer), tokens
        if before > 0:
            past = rows[:, :, 1:] if before >= most else rows[:, :, :before]
            every = torch.cat([past, tokens], dim=2)
        rows.copy_(every[:, :, -most:])
        return every

    def room_for_one(self, layer: Any) -> Tensor:
        rows = self._rows_beside(layer)
        if layer.cumulative_length_int > self.max_cache_len:
            # rows move now, as those of keys and values have done
            rows.copy_(rows.roll(-1, dims=2))
        return rows


class StaticWindowPowers(TracedStaticWindowPowers, nn.Module):
    """:class:`TracedStaticWindowPowers` as a module, as :class:`StaticPowers` is one."""

    def __init__(self, max_cache_len: int) -> None:
        nn.Module.__init__(self)
        StaticLayer.__init__(self, max_cache_len)


def _new_counters(heads: int, device: torch.device | str) -> Tensor:
    """Zeros in which the decode kernel's programs of a head count how many of them are done."""
    counters = torch.zeros(heads, dtype=torch.int32, device=device)
    # as the layer's own tensors: a graph that writes to it can be captured
    torch._dynamo.mark_static_address(counters)
    return counters


def counters_beside(layer: Any, heads: int, device: torch.device) -> Tensor | None:
    """The counters of a static layer of the cache that has no powers, as with filters of degree 1.

    None for other layers, on a CPU, and where none were made before a graph was traced.

    Args:
        heads: query heads of all sequences.
    """
    counters: Tensor | None = getattr(layer, "gfsa_counters", None)
    if counters is not None and len(counters) >= heads and counters.device == device:
        return counters
    if device.type != "cuda" or torch.compiler.is_compiling() or not isinstance(layer, StaticLayer):
        return None
    if torch.cuda.is_current_stream_capturing():
        # they would be the graph's memory
        return None
    counters = layer.gfsa_counters = _new_counters(heads, device)
    return counters


# of a tuple, because isinstance is slow where every token asks
STATIC = (StaticPowers, TracedStaticPowers, StaticWindowPowers, TracedStaticWindowPowers)


def _write(rows: Tensor, position: Tensor, tokens: Tensor) -> None:
    try:
        rows.index_copy_(2, position, tokens)
    except NotImplementedError:
        # on a device without it, such as mps
        rows[:, :, position] = tokens


def _can_be_written(tokens: Tensor) -> bool:
    """Whether rows may be written in place, rather than copied to a new tensor with the others."""
    return (
        type(tokens) is Tensor
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )


# layers that keep something beside keys and values: the state of a recurrent mixer in the same
# block (Falcon-H1, Zamba), or the keys of an indexer (DeepSeek-V3.2); by name, because older
# versions of transformers lack some of them
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
        companion = DynamicSlidingWindowLayer(sliding_window=layer.sliding_window)
        companion.record_past = layer.record_past
        return companion
    if kind is StaticLayer or kind is StaticSlidingWindowLayer:
        is_window = kind is StaticSlidingWindowLayer
        # a graph that is traced cannot make a module
        if torch.compiler.is_compiling():
            traced = TracedStaticWindowPowers if is_window else TracedStaticPowers
            return traced(max_cache_len=layer.max_cache_len)
        # that of a window is already the smaller of the window and the length
        made = StaticWindowPowers if is_window else StaticPowers
        return made(max_cache_len=layer.max_cache_len)
    raise TypeError(
        f"a plugged model cannot decode with a {kind.__name__} in its cache; use a dynamic or "
        "static cache (with or without a sliding window), or use_cache=False"
    )


def counts_its_tokens(companion: Any) -> bool:
    """Whether a companion knows how many tokens it has powers of, beside its layer.

    A static one does not. A window's number grows apart from the number of its rows: a compiled
    call would have two of them, the layer's and the companion's, that are equal. Torch 2.11 then
    names both by one, and loses it where nothing else in the graph uses it.
    """
    kind = type(companion)
    if kind is DynamicSlidingWindowLayer:
        return not torch.compiler.is_compiling()
    return kind not in STATIC


def append(companion: Any, tokens: Tensor, layer: Any, keys: int) -> Tensor:
    """Append the newest tokens' power to the companion of a layer; returns its first ``keys`` rows.

    The keys and values of the same tokens were added to the layer.
    """
    all_tokens: Tensor
    kind = type(companion)
    # not by isinstance, which is slow here
    if kind in STATIC:
        all_tokens = companion.add(tokens, layer)
    elif kind is GrowingPowers:
        # an offloading cache has moved the companion to the CPU together with the keys
        companion.prefetch()
        all_tokens = companion.add(tokens)
    else:
        companion.prefetch()
        all_tokens = _update(companion, tokens, layer)
    return all_tokens if all_tokens.shape[2] == keys else all_tokens[:, :, :keys]


def room_for_one(companion: Any, like: Tensor, layer: Any) -> Tensor:
    """The rows of a layer's companion, with one for the newest token, which the caller writes.

    Args:
        like: ``(B, H, 1, D)``, what such a row is like.
    """
    rows: Tensor
    kind = type(companion)
    if kind in STATIC:
        rows = companion.room_for_one(layer)
    elif kind is GrowingPowers:
        companion.prefetch()
        rows = companion.room_for_one(like)
    else:
        companion.prefetch()
        rows = _update(companion, like.new_empty(like.shape), layer)
    return rows


def _update(companion: DynamicSlidingWindowLayer, tokens: Tensor, layer: Any) -> Tensor:
    """Append the newest tokens to a window that grows; returns all tokens."""
    if not counts_its_tokens(companion):
        companion.cumulative_length = layer.cumulative_length - tokens.shape[2]
    # the layer's slot for values gets a tensor without features
    every: Tensor = companion.update(tokens, tokens[..., :0])[0]
    return every


def next_row(companion: Any, length: int, device: torch.device) -> Tensor | None:
    """As :func:`room_for_one`, for a caller in eager mode whose token is number ``length``.

    None unless a growing companion has a free row for that token: it asks little, because a token
    needs it in each layer.
    """
    if type(companion) is not GrowingPowers or companion.length + 1 != length:
        return None
    rows = companion._rows
    assert rows is not None
    if not companion._is_writable or rows.device != device:
        return None
    if not length <= rows.shape[2] <= 2 * length + _MOST_FREE:
        return None
    companion.length = length
    return rows


def has_rows_like(companion: Any, like: Tensor) -> bool:
    """Whether an initialised companion keeps powers of these sequences, heads and this dtype.

    Args:
        like: ``(B, H, N, D)``.
    """
    rows: Any = companion._rows if type(companion) is GrowingPowers else companion.keys
    batch, heads, _, dim = rows.shape
    same: bool = (batch, heads, dim) == (*like.shape[:2], like.shape[3])
    return same and bool(rows.dtype == like.dtype)
