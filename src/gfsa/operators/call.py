"""The arguments of an attention call: one record, their checks, autocast, and export.

Checks say what was expected, what was got, and what to pass instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.operators.operator import at_least_float32, repeat_heads, take_heads

if TYPE_CHECKING:
    from gfsa.operators.visibility import Visibility

# not torch.nn.functional's, which may be replaced when this module is imported
TORCH_ATTENTION = torch._C._nn.scaled_dot_product_attention
DropoutPlace = Literal["attention", "filter"]


class AttentionCall(NamedTuple):
    """What defines the map ``A = softmax(scale·q·kᵀ + mask)``, as every operator takes it.

    Args:
        q, k, attn_mask, dropout_p, is_causal, scale, enable_gqa: as in
            :func:`gfsa.graph_filter_attention`.
        dropout_after: whether entries of A or of H are dropped, see
            :class:`~gfsa.operators.DenseOperator`.
        visible: in place of ``attn_mask`` and ``is_causal``: what a query sees, described rather
            than written out as a mask.
    """

    q: Tensor
    k: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    dropout_after: DropoutPlace = "attention"
    visible: Visibility | None = None

    # torch 2.6's compiler knows neither _replace nor properties of named tuples

    def without_dropout(self) -> AttentionCall:
        """The same map, no entry dropped."""
        q, k, mask, _, is_causal, scale, enable_gqa, _, visible = self
        return AttentionCall(q, k, mask, 0.0, is_causal, scale, enable_gqa, visible=visible)

    def with_key_mask(self) -> AttentionCall:
        """The same map by a key mask and causality, where ``visible`` has nothing else."""
        visible = self.visible
        if visible is None or not visible.is_key_mask():
            return self
        q, k, _, dropout_p, _, scale, enable_gqa, place, _ = self
        mask = visible.mask
        return AttentionCall(q, k, mask, dropout_p, visible.causal, scale, enable_gqa, place)

    def reason_for_torch_alone(self) -> str | None:
        """Why torch's attention alone can compute A, or None if other operators can too."""
        if self.q.is_nested:
            return "only torch's attention knows which tokens of a nested tensor belong together"
        # context parallel replaces torch's function, so that a call with the tokens of one process
        # attends to all tokens
        if F.scaled_dot_product_attention is TORCH_ATTENTION:
            return None
        return "torch's attention is replaced (context parallel), and only the replacement knows A"

    def of_heads(self, heads: Sequence[int]) -> AttentionCall:
        """The map of some query heads, keys repeated for each of them, no entry dropped."""
        return AttentionCall(
            take_heads(self.q, heads),
            take_heads(repeat_heads(self.k, self.q), heads),
            None if self.attn_mask is None else take_heads(self.attn_mask, heads),
            is_causal=self.is_causal,
            scale=self.scale,
            visible=None if self.visible is None else self.visible.of_heads(heads),
        )


_Decision = TypeVar("_Decision")


class DecisionCache(dict[Any, _Decision]):
    """Decisions by all that they depend on; emptied when full, as by ever new lengths."""

    CAPACITY = 4096

    def remember(self, signature: tuple[Any, ...], decision: _Decision) -> None:
        if len(self) >= self.CAPACITY:
            self.clear()
        self[signature] = decision


def check_dropout_place(dropout_after: DropoutPlace) -> DropoutPlace:
    """``dropout_after`` itself, or a ValueError."""
    if dropout_after not in ("attention", "filter"):
        raise ValueError(f"dropout_after must be 'attention' or 'filter', got {dropout_after!r}")
    return dropout_after


def check_kinds(**tensors: Any) -> None:
    """Each of these must be a tensor; masks may be None."""
    for name, value in tensors.items():
        optional = name.endswith("mask")
        if not (isinstance(value, Tensor) or (optional and value is None)):
            hint = "; torch.fx cannot trace a filter: make the plugged layer a leaf (docs/timm.md)"
            raise TypeError(
                f"{name} must be a tensor{' or None' if optional else ''}, "
                f"got {type(value).__name__}{hint if isinstance(value, torch.fx.Proxy) else ''}"
            )


_NUMBER = (float, int, torch.SymInt, torch.SymFloat)
_BOOL = (bool, torch.SymBool)


def check_options(dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> None:
    """Numbers and bools where they belong."""
    for name, value in (("dropout_p", dropout_p), ("scale", scale)):
        if not (isinstance(value, _NUMBER) or (name == "scale" and value is None)):
            raise TypeError(f"{name} must be a number, got {value!r}")
    for name, value in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(value, _BOOL):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_call(call: AttentionCall, v: Tensor) -> None:
    """Refuse arguments for which the filter is not defined."""
    q, k = call.q, call.k
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise TypeError(
            "q, k and v must share one floating-point dtype, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}; cast them first"
        )
    _check_devices(q.device, k=k, v=v, attn_mask=call.attn_mask)
    if q.is_nested or k.is_nested or v.is_nested:
        # as torch's attention takes them
        if not all(x.is_nested and x.layout == torch.jagged and x.dim() == 4 for x in (q, k, v)):
            raise ValueError(
                "nested q, k and v must be jagged (B, H, j, D), each of them: make (B, j, H, D) "
                "with torch.nested.nested_tensor(..., layout=torch.jagged), then x.transpose(1, 2)"
            )
        if call.attn_mask is not None or call.enable_gqa:
            raise ValueError(
                "nested tensors take neither attn_mask (their sequences never see one another) nor "
                "enable_gqa (repeat the heads of k and v)"
            )
    if min(q.dim(), k.dim(), v.dim()) < 2 or not (q.dim() == k.dim() == v.dim()):
        raise ValueError(
            "q, k and v must have shape (..., H, N, D) with the same number of dimensions, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k differ in head dim: {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v differ in length: {k.shape[-2]} and {v.shape[-2]} tokens")
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"{q.shape[-2]} queries attend to {k.shape[-2]} keys: cross-attention has no powers, "
            "the filter needs queries and keys of the same tokens. To decode with a cache, keep "
            "A·v of past tokens beside their keys and values: gfsa.plug does so in models of "
            "transformers, docs/adapters.md shows how to in attention of your own"
        )
    _check_heads(q, k, v, call.enable_gqa)
    if not 0.0 <= call.dropout_p <= 1.0:
        raise ValueError(
            f"dropout_p is a probability, expected 0 ≤ dropout_p ≤ 1, got {call.dropout_p}"
        )
    # some of torch's kernels make finite numbers of it
    if call.scale is not None and not -math.inf < call.scale < math.inf:
        raise ValueError(f"scale must be a finite number, or None for 1/√D, got {call.scale}")
    if call.attn_mask is not None:
        _check_mask(call.attn_mask, q.dtype, (*q.shape[:-1], k.shape[-2]))
    if call.visible is not None:
        if call.attn_mask is not None or call.is_causal or q.is_nested:
            raise ValueError(
                "visible takes the place of attn_mask and is_causal, and nested tensors have none: "
                "pass one of them"
            )
        _check_described(call.visible, q)


def _check_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    is_grouped, advice = False, "expand them, or pass enable_gqa=True if k and v have fewer heads"
    if enable_gqa:
        if q.dim() < 3:
            raise ValueError("enable_gqa needs inputs with a head dimension, (..., H, N, D)")
        if k.shape[-3] == 0:
            raise ValueError(f"enable_gqa needs heads in k and v, got k of shape {tuple(k.shape)}")
        is_grouped = q.shape[:-3] == k.shape[:-3] and q.shape[-3] % k.shape[-3] == 0
        advice = "with enable_gqa, k and v must have the same heads, q a multiple of them"
    if k.shape[:-2] != v.shape[:-2] or not (is_grouped or q.shape[:-2] == k.shape[:-2]):
        raise ValueError(
            "q, k and v differ in their batch or head dimensions: "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}; {advice}"
        )


def _check_mask(attn_mask: Tensor, dtype: torch.dtype, scores: tuple[int, ...]) -> None:
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
        raise TypeError(
            f"attn_mask must be bool (True takes part), or float32 or q's {dtype} (added), "
            f"got {attn_mask.dtype}; convert an integer 0/1 mask with attn_mask.bool(), "
            "an additive one with attn_mask.to(q.dtype)"
        )
    shape = tuple(attn_mask.shape)
    if not _broadcasts(shape, scores):
        raise ValueError(
            f"attn_mask of shape {shape} does not broadcast to the scores' {scores}; "
            "pass a key-padding mask (B, N) as attn_mask[:, None, None, :]"
        )


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of ``shape`` broadcasts to ``wanted``."""
    # torch 2.6's compiler zips tuples of one length only
    last = wanted[len(wanted) - len(shape) :]
    return len(shape) <= len(wanted) and all(
        size in (1, full) for size, full in zip(shape, last, strict=True)
    )


def _check_devices(device: torch.device, **tensors: Tensor | None) -> None:
    # the fused kernels take addresses, and would read those of another device
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"q is on {device}, {name} on {tensor.device}; move one of them")


def _check_described(visible: Visibility, q: Tensor) -> None:
    # the fused kernels read keys and documents by token, and do not look for their end
    _check_devices(q.device, keys=visible.keys, pairs=visible.pairs, documents=visible.documents)
    tokens = tuple(q.shape[:-1])
    for name, part in (("keys", visible.keys), ("documents", visible.documents)):
        shape = tokens if part is None else tuple(part.shape)
        if not _broadcasts(shape, tokens) or shape[-1] != tokens[-1]:
            raise ValueError(
                f"visible.{name} of shape {shape} does not fit the tokens' (..., H, N) = {tokens}: "
                "expected N numbers for all rows, or (B, 1, N), a row for each sequence"
            )


def check_coefficients(coeffs: Tensor, q: Tensor) -> Tensor:
    """The coefficients in the precision in which sums are kept."""
    check_kinds(coeffs=coeffs)
    if not coeffs.is_floating_point():
        raise TypeError(f"coeffs must be floating point, best float32, got {coeffs.dtype}")
    per_head = coeffs.dim() == 2 and q.dim() >= 3 and coeffs.shape[0] == q.shape[-3]
    if not (per_head or coeffs.dim() == 1) or coeffs.shape[-1] == 0:
        heads = q.shape[-3] if q.dim() >= 3 else "none"
        raise ValueError(
            "coeffs must be (m+1,), or (H, m+1) with a row for each query head "
            f"(H = {heads} here), lowest power first; got {tuple(coeffs.shape)}"
        )
    _check_devices(q.device, coeffs=coeffs)
    return in_full_precision(coeffs)


def check_share(exclusive: float | Tensor, q: Tensor) -> Tensor:
    """The share of the exclusive term as a tensor: a number, or ``(H,)``."""
    heads = q.shape[-3] if q.dim() >= 3 else 1
    wanted = f"exclusive must be a number, or a tensor with one for each of {heads} query heads"
    if isinstance(exclusive, bool) or not isinstance(exclusive, (int, float, Tensor)):
        raise TypeError(f"{wanted}; got {type(exclusive).__name__}")
    if not isinstance(exclusive, Tensor):
        if not math.isfinite(exclusive):
            raise ValueError(f"exclusive must be finite, got {exclusive}")
        return torch.full((), float(exclusive), dtype=at_least_float32(q.dtype), device=q.device)
    if exclusive.dim() > 1 or exclusive.numel() not in (1, heads):
        raise ValueError(f"{wanted}; got shape {tuple(exclusive.shape)}")
    _check_devices(q.device, exclusive=exclusive)
    return in_full_precision(exclusive.reshape(() if exclusive.numel() == 1 else -1))


def in_full_precision(coeffs: Tensor) -> Tensor:
    """The coefficients in float32, or float64 if they are."""
    return coeffs.to(at_least_float32(coeffs.dtype))


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, for operators, which choose their precision themselves."""
    kind, compiling = device.type, torch.compiler.is_compiling()
    if compiling or (_has_autocast(kind) and torch.is_autocast_enabled(kind)):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _has_autocast(device: str) -> bool:
    # the compiler cannot trace the query, and every device that it compiles for has autocast
    known = device in ("cuda", "cpu") or torch.compiler.is_compiling()
    return known or _autocast_is_available(device)


_autocast_is_available = functools.cache(torch.amp.is_autocast_available)


def autocast(*tensors: Any) -> Any:
    """Cast as autocast casts the arguments of torch's own attention, by the first one's device."""
    device = tensors[0].device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        stays = x is None or x.dtype == torch.float64 or not x.dtype.is_floating_point
        return x if stays else x.to(dtype)

    return tuple(map(cast, tensors))


def is_exporting() -> bool:
    """Whether torch.export or torch.jit.trace runs the model now."""
    # torch.compiler.is_exporting is true in everything that dynamo traces; torch 2.6 has neither
    return torch.jit.is_tracing() or bool(getattr(torch.compiler, "_is_exporting_flag", False))
