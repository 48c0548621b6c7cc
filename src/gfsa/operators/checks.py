"""Checks of the arguments of an attention call: what is refused, and what to pass instead."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gfsa.operators.base import at_least_float32
from gfsa.operators.call import AttentionCall

if TYPE_CHECKING:
    from gfsa.operators.visibility import Visibility


def check_kinds(**tensors: Any) -> None:
    """Each of these must be a tensor; masks may be None."""
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            continue
        optional = name.endswith("mask")
        if not (optional and value is None):
            hint = "; torch.fx cannot trace a filter: make the plugged layer a leaf (docs/timm.md)"
            raise TypeError(
                f"{name} must be a tensor{' or None' if optional else ''}, "
                f"got {type(value).__name__}{hint if isinstance(value, torch.fx.Proxy) else ''}"
            )


_NUMBER = (float, int, torch.SymInt, torch.SymFloat)
_BOOL = (bool, torch.SymBool)


def check_options(dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> None:
    """Numbers and bools where they belong."""
    if not isinstance(dropout_p, _NUMBER):
        raise TypeError(f"dropout_p must be a number, got {dropout_p!r}")
    if not (scale is None or isinstance(scale, _NUMBER)):
        raise TypeError(f"scale must be a number, got {scale!r}")
    if not isinstance(is_causal, _BOOL):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}")
    if not isinstance(enable_gqa, _BOOL):
        raise TypeError(f"enable_gqa must be True or False, got {enable_gqa!r}")


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
        _check_jagged(call, v)
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
    if call.visible is not None and (call.attn_mask is not None or call.is_causal or q.is_nested):
        raise ValueError(
            "visible takes the place of attn_mask and is_causal, and nested tensors have none: "
            "pass one of them"
        )
    if call.visible is not None:
        _check_described(call.visible, q)


def _check_jagged(call: AttentionCall, v: Tensor) -> None:
    """Nested tensors are taken as torch's attention takes them."""
    tokens = (call.q, call.k, v)
    if not all(x.is_nested and x.layout == torch.jagged and x.dim() == 4 for x in tokens):
        raise ValueError(
            "nested q, k and v must be jagged (B, H, j, D), each of them: make (B, j, H, D) with "
            "torch.nested.nested_tensor(..., layout=torch.jagged), then x.transpose(1, 2)"
        )
    if call.attn_mask is not None or call.enable_gqa:
        raise ValueError(
            "nested tensors take neither attn_mask (their sequences never see one another) nor "
            "enable_gqa (repeat the heads of k and v)"
        )


def _check_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    if not enable_gqa:
        if not (q.shape[:-2] == k.shape[:-2] == v.shape[:-2]):
            raise ValueError(
                "q, k and v differ in their batch or head dimensions: "
                f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}; "
                "expand them, or pass enable_gqa=True if k and v have fewer heads"
            )
        return
    if q.dim() < 3:
        raise ValueError("enable_gqa needs inputs with a head dimension, (..., H, N, D)")
    if not (q.shape[:-3] == k.shape[:-3] == v.shape[:-3]) or k.shape[-3] != v.shape[-3]:
        raise ValueError(
            "with enable_gqa, k and v must agree in heads and all three in batch, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
        raise ValueError(
            f"with enable_gqa, q's {q.shape[-3]} heads must be a multiple of k's {k.shape[-3]}"
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
    """The fused kernels take addresses, and would read those of another device."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"q is on {device}, {name} on {tensor.device}; move one of them")


def _check_described(visible: Visibility, q: Tensor) -> None:
    """The fused kernels read ``keys`` and ``documents`` by token, and do not look for their end."""
    _check_devices(q.device, keys=visible.keys, pairs=visible.pairs, documents=visible.documents)
    tokens = tuple(q.shape[:-1])
    for name, part in (("keys", visible.keys), ("documents", visible.documents)):
        if part is None:
            continue
        shape = tuple(part.shape)
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
    if coeffs.device != q.device:
        raise ValueError(f"coeffs are on {coeffs.device}, q is on {q.device}; move one of them")
    return in_full_precision(coeffs)


def check_share(exclusive: float | Tensor, q: Tensor) -> Tensor:
    """The share of the exclusive term as a tensor: a number, or ``(H,)``."""
    if isinstance(exclusive, bool) or not isinstance(exclusive, (int, float, Tensor)):
        raise TypeError(
            "exclusive must be a number or a tensor with one number for each query head, got "
            f"{type(exclusive).__name__}"
        )
    if not isinstance(exclusive, Tensor):
        if not math.isfinite(exclusive):
            raise ValueError(f"exclusive must be finite, got {exclusive}")
        return torch.full((), float(exclusive), dtype=at_least_float32(q.dtype), device=q.device)
    heads = q.shape[-3] if q.dim() >= 3 else 1
    if exclusive.dim() > 1 or exclusive.numel() not in (1, heads):
        raise ValueError(
            f"exclusive must be a number or one number for each of {heads} query heads, got shape "
            f"{tuple(exclusive.shape)}"
        )
    if exclusive.device != q.device:
        raise ValueError(f"exclusive is on {exclusive.device}, q is on {q.device}; move one")
    return in_full_precision(exclusive.reshape(() if exclusive.numel() == 1 else -1))


def in_full_precision(coeffs: Tensor) -> Tensor:
    """The coefficients in float32, or float64 if they are."""
    if coeffs.dtype in (torch.float32, torch.float64):
        return coeffs
    return coeffs.to(at_least_float32(coeffs.dtype))
