"""Which keys each query of a layer may attend to: described in O(N), or read from its masks.

A call that has a :class:`Visibility` instead of a mask never needs a tensor of size N×N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.call import AttentionCall
from gfsa.operators.operator import take_heads


@dataclass(frozen=True)
class Visibility:
    """What each query sees; without any mask, all keys.

    Args:
        keys: ``(..., H or 1, N)``, True where a key is visible to queries.
        pairs: ``(..., H or 1, N, N)``, True where a query (row) sees a key (column); replaces
            everything else.
        causal: a query sees itself and the tokens before it.
        window: query i sees key j only if ``|i - j| < window``.
        documents: ``(..., H or 1, N)`` integers, a query sees the keys of its own document only
            (several sequences packed into one row).
        in_order: the numbers of ``documents`` do not decrease from token to token, as in packed
            rows. The caller knows it; checking it would wait for the device.

    Tensors that the caller changes in place are read again in the next call.
    """

    keys: Tensor | None = None
    pairs: Tensor | None = None
    causal: bool = False
    window: int | None = None
    documents: Tensor | None = None
    in_order: bool = False
    _written: dict[tuple[str, int, torch.device], tuple[Any, Tensor]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @classmethod
    def packed(cls, cu_seqlens: Tensor, length: int, window: int | None = None) -> Visibility:
        """Causal documents packed into one row of ``length`` tokens.

        Args:
            cu_seqlens: ``(documents + 1,)`` integers, where each document begins, and where the
                last one ends; tokens outside are documents, too.
        """
        tokens = torch.arange(length, device=cu_seqlens.device)
        documents = torch.searchsorted(cu_seqlens.contiguous(), tokens, right=True)
        return cls(None, None, True, window, documents[None], in_order=True)

    @classmethod
    def from_call(cls, call: AttentionCall) -> Visibility:
        """The visibility in an attention call, whose mask broadcasts to ``(..., H, N, N)``."""
        if call.visible is not None:
            return call.visible
        pairs = call.attn_mask
        if pairs is None:
            return cls(causal=call.is_causal)
        pairs = pairs[(None,) * (max(3, call.q.dim()) - pairs.dim())]
        pairs = pairs.expand(*pairs.shape[:-1], call.k.shape[-2])
        if pairs.is_floating_point():
            # libraries write -inf, or the smallest number
            pairs = pairs > torch.finfo(pairs.dtype).min / 2
        pairs = pairs.bool()
        if pairs.shape[-2] == 1:
            # the same keys for every query
            return cls(pairs[..., 0, :], None, call.is_causal)
        if call.is_causal:
            size = pairs.shape[-2], max(pairs.shape[-2:])
            pairs = pairs & torch.ones(size, dtype=torch.bool, device=pairs.device).tril()
        return cls(None, pairs)

    @property
    def mask(self) -> Tensor | None:
        """Bool, broadcastable to ``(..., H, N, N)``, without what the other fields hide."""
        return self.keys[..., None, :] if self.keys is not None else self.pairs

    def rows(self, start: int, stop: int, length: int, device: torch.device) -> Tensor:
        """True where queries ``start … stop`` see one of ``length`` keys; to be broadcast."""
        return self.block(slice(start, stop), slice(0, length), device)

    def block(self, rows: slice, keys: slice, device: torch.device) -> Tensor:
        """:meth:`rows` for some keys alone: ``(..., H or 1, rows, keys)``."""
        if self.pairs is not None:
            whole = self.pairs.expand(*self.pairs.shape[:-1], max(keys.stop, self.pairs.shape[-1]))
            return whole[..., rows, keys]
        visible = torch.ones(1, keys.stop - keys.start, dtype=torch.bool, device=device)
        if self.keys is not None:
            visible = visible & self.keys[..., None, keys]
        if self.causal or self.window is not None:
            key = torch.arange(keys.start, keys.stop, device=device)
            query = torch.arange(rows.start, rows.stop, device=device)[:, None]
            if self.causal:
                visible = visible & (key <= query)
            if self.window is not None:
                visible = visible & (key > query - self.window) & (key < query + self.window)
        if self.documents is not None:
            own = self.documents[..., rows, None]
            visible = visible & (own == self.documents[..., None, keys])
        return visible

    def whole(self, length: int, device: torch.device) -> Tensor:
        """:meth:`rows` of all queries, written out once for all layers that share this object."""
        return self._once("whole", length, device, lambda: self.rows(0, length, length, device))

    def spans(self, length: int, device: torch.device) -> Tensor:
        r"""Where the keys of a query begin and the queries of a key end, computed once.

        .. math:: first_i = \max(start_i,\ i - window + 1), \qquad
            last_j = \min(end_j,\ j + window - 1)

        with the first and the last token of the document that a token is in. Query i sees the keys
        ``first_i … i``, which :func:`refusal_of_spans` must have found to be all that is described.
        ``first`` and ``last`` are int32, ``(B or 1, 2, N)``.
        """
        return self._once("spans", length, device, lambda: self._spans(length, device))

    def _spans(self, length: int, device: torch.device) -> Tensor:
        token = torch.arange(length, device=device, dtype=torch.int32)
        if self.documents is not None:
            numbers = self.documents.reshape(-1, length).contiguous()
            first = torch.searchsorted(numbers, numbers, out_int32=True)
            last = torch.searchsorted(numbers, numbers, out_int32=True, right=True) - 1
            # numbers that decrease although in_order says otherwise are found anywhere, and a
            # kernel would wait for keys behind its queries forever
            first, last = torch.minimum(first, token), torch.maximum(last, token)
        else:
            first = torch.zeros(1, length, device=device, dtype=torch.int32)
            last = torch.full_like(first, length - 1)
        if self.window is not None:
            # a window may be larger than int32
            others = min(self.window, length) - 1
            first = torch.maximum(first, token - others)
            last = torch.minimum(last, token + others)
        return torch.stack((first, last), 1)

    def _once(
        self, what: str, length: int, device: torch.device, compute: Callable[[], Tensor]
    ) -> Tensor:
        """What all layers share that share this object."""
        if (
            # a compiled graph keeps no state, and its compiler finds what it computes twice
            torch.compiler.is_compiling()
            # each replay of a captured graph computes it, from its own documents
            or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
            # torch does not count changes of tensors that were made in inference mode
            or any(part is not None and part.is_inference() for part in self._parts())
        ):
            return compute()
        key = (what, length, device)
        versions = (None if part is None else part._version for part in self._parts())
        # what is written in inference mode cannot be saved for a gradient
        state = (torch.is_inference_mode_enabled(), *versions)
        before, written = self._written.get(key, (None, None))
        if written is None or before != state:
            written = compute()
            self._written[key] = state, written
        return written

    def _parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.keys, self.pairs, self.documents

    def is_key_mask(self) -> bool:
        """Whether a key mask and causality say what a query sees."""
        return self.pairs is None and self.window is None and self.documents is None

    def needs_rows(self) -> bool:
        """Whether neither a key mask nor causality says it alone."""
        return not self.is_key_mask() or (self.causal and self.keys is not None)

    def visible_keys(self) -> Tensor | None:
        """``(..., N)``, True where some query of some head sees the key; None if all are seen."""
        if self.keys is not None:
            return self.keys.any(-2)
        return None if self.pairs is None else self.pairs.any(-2).any(-2)

    def signature(self) -> tuple[Any, ...]:
        """All of it that a choice of kernels depends on."""
        layouts = (x if x is None else (x.shape, x.stride(), x.device) for x in self._parts())
        return (*layouts, self.causal, self.window, self.in_order)

    def of_heads(self, heads: Sequence[int]) -> Visibility:
        """What the queries of some heads see."""
        keys, documents = (
            None if x is None else take_heads(x[..., None], heads)[..., 0]
            for x in (self.keys, self.documents)
        )
        pairs = None if self.pairs is None else take_heads(self.pairs, heads)
        return Visibility(keys, pairs, self.causal, self.window, documents, self.in_order)


def refusal_of_spans(visible: Visibility) -> str | None:
    """Why :meth:`Visibility.spans` do not say what a query sees, or None if they do."""
    if visible.pairs is not None or visible.keys is not None:
        return "padding or a mask comes on top of a window or documents"
    if not visible.causal:
        return "queries see later tokens, too"
    if visible.window is not None and visible.window < 1:
        return f"a window of {visible.window} tokens leaves a query not even itself"
    if visible.documents is not None:
        if not visible.in_order:
            return "documents may lie across one another (Visibility's in_order is False)"
        if visible.documents.dim() > 1 and visible.documents.shape[-2] != 1:
            return "documents differ from head to head"
    return None
