"""What attention takes: refuse what has no meaning, and say what was expected."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gfsa.operators.base import at_least_float32


def check_kinds(**tensors: Any) -> None:
    """Each of these must be a tensor; masks may be left out."""
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            continue
        optional = name.endswith("mask")
        if not (optional and value is None):
            raise TypeError(
                f"{name} must be a tensor{' or None' if optional else ''}, "
                f"got {type(value).__name__}"
            )


_NUMBER = (float, int, torch.SymInt, torch.SymFloat)
_YES_OR_NO = (bool, torch.SymBool)


def check_options(dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> None:
    """Numbers where numbers belong, yes or no where that belongs."""
    if not isinstance(dropout_p, _NUMBER):
        raise TypeError(f"dropout_p must be a number, got {dropout_p!r}")
    if not (scale is None or isinstance(scale, _NUMBER)):
        raise TypeError(f"scale must be a number, got {scale!r}")
    if not isinstance(is_causal, _YES_OR_NO):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}")
    if not isinstance(enable_gqa, _YES_OR_NO):
        raise TypeError(f"enable_gqa must be True or False, got {enable_gqa!r}")


def check_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    enable_gqa: bool,
) -> None:
    """Refuse what has no meaning."""
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise TypeError(
            "q, k and v must share one floating-point dtype, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}; cast them first"
        )
    if q.is_nested or k.is_nested or v.is_nested:
        _check_jagged(q, k, v, attn_mask, enable_gqa)
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
            "the filter needs queries and keys of the same tokens. While decoding with a cache, "
            "plug the model (gfsa.plug): its cache keeps what the past contributes"
        )
    _check_heads(q, k, v, enable_gqa)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p is a probability, expected 0 ≤ dropout_p ≤ 1, got {dropout_p}")
    if attn_mask is not None:
        _check_mask(attn_mask, q.dtype, (*q.shape[:-1], k.shape[-2]))


def _check_jagged(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> None:
    """Nested tensors are taken as torch's attention takes them."""
    if not all(x.is_nested and x.layout == torch.jagged and x.dim() == 4 for x in (q, k, v)):
        raise ValueError(
            "nested q, k and v must be jagged (B, H, j, D), each of them: make (B, j, H, D) with "
            "torch.nested.nested_tensor(..., layout=torch.jagged), then x.transpose(1, 2)"
        )
    if attn_mask is not None or enable_gqa:
        raise ValueError(
            "nested tensors take neither attn_mask (sequences do not see one another as it is) "
            "nor enable_gqa (repeat the heads of k and v)"
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
            f"got {attn_mask.dtype}; an integer 0/1 mask wants attn_mask.bool(), "
            "an additive one attn_mask.to(q.dtype)"
        )
    shape = tuple(attn_mask.shape)
    fits = len(shape) <= len(scores) and all(
        mine in (1, theirs) for mine, theirs in zip(reversed(shape), reversed(scores), strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask of shape {shape} does not broadcast to the scores' {scores}; "
            "a key-padding mask (B, N) wants attn_mask[:, None, None, :]"
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


def in_full_precision(coeffs: Tensor) -> Tensor:
    """The coefficients in float32, or float64 if they are."""
    if coeffs.dtype in (torch.float32, torch.float64):
        return coeffs
    return coeffs.to(at_least_float32(coeffs.dtype))
