"""Graph-filter attention as functions: check the arguments, choose an operator, apply it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gfsa.operators import DenseOperator, LinearOperator, Operator, SDPAOperator
from gfsa.operators.base import at_least_float32, take_heads
from gfsa.operators.dense import DropoutPlace, check_dropout_place, repeat_heads
from gfsa.operators.select import Backend, Call, Choice, choose


def graph_filter_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    r"""Attention with a polynomial of its map.

    .. math:: y_h = \sum_{k=0}^{m} c_{h,k}\,A_h^k\,v_h,
              \qquad A = \mathrm{softmax}(\mathrm{scale}\cdot q k^\top + \mathrm{mask})

    The signature of :func:`torch.nn.functional.scaled_dot_product_attention` with coefficients
    added. Coefficients (0, 1) or (0, 1, 0) are ordinary attention: to the bit wherever torch's own
    kernel makes the first pass, to rounding with the fused kernels for short sequences.

    Args:
        q, k, v: ``(..., H, N, D)``; v's head dim may differ. Queries and keys are the same tokens:
            cross-attention has no powers. Sequences of different lengths may be jagged nested
            tensors ``(B, H, j, D)`` with the same offsets.
        coeffs: ``(H, m+1)`` or ``(m+1,)``, lowest power first. Degree m costs m passes.
        attn_mask: bool (True takes part) or additive, broadcastable to ``(..., H, N, N)``;
            gradients reach an additive mask. A row with no key left gives ``c0·v``.
        dropout_p: drops entries of A once, then takes its powers. As in torch it is always on:
            pass 0.0 in evaluation.
        is_causal: may be combined with a mask here.
        scale: default ``1/sqrt(D)``.
        enable_gqa: k and v may have fewer heads than q (a divisor); coefficients are per query
            head.
        backend: ``"auto"``, or one by name (for tests and benchmarks): ``"dense"``, ``"sdpa"``,
            ``"fused"``. One asked for by name never gives way to another in silence;
            :func:`which_backend` tells what ``"auto"`` does.

    Returns:
        ``(..., H, N, D_v)`` in v's dtype (under autocast, in autocast's).
    """
    operator = AttentionOperator(q, k, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend)
    return operator.polynomial(coeffs, v)


class AttentionOperator(Operator):
    """Softmax attention whose kernel is chosen call by call.

    The operator that :func:`graph_filter_attention` applies, for callers that hand an operator to
    a filter: ``filter(AttentionOperator(q, k), v)``. Arguments as there, and ``dropout_after``
    as in :class:`~gfsa.operators.DenseOperator`.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        backend: Backend = "auto",
        dropout_after: DropoutPlace = "attention",
    ) -> None:
        _check_kinds(q=q, k=k, attn_mask=attn_mask)
        _check_options(dropout_p, is_causal, scale, enable_gqa)
        self.q, self.k, self.attn_mask = _autocast(q, k, attn_mask)
        self.dropout_p = dropout_p
        self.is_causal = is_causal
        self.scale = scale
        self.enable_gqa = enable_gqa
        self.backend = backend
        self.dropout_after = check_dropout_place(dropout_after)

    def apply(self, x: Tensor) -> Tensor:
        # x may be a power of A on v, which has a head for each query head whatever v has
        (x,) = _autocast(x)
        with _no_autocast(x.device):
            return self._chosen(x, 1).apply(x)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        v = self._prepare(v)
        with _no_autocast(v.device):
            return self._chosen(v, degree).powers(v, degree)

    def polynomial(self, coeffs: Tensor, v: Tensor) -> Tensor:
        v, coeffs = self._prepare(v), _check_coefficients(coeffs, self.q)
        with _no_autocast(v.device):
            return self._chosen(v, coeffs.shape[-1] - 1).polynomial(coeffs, v)

    def second_pass(self, heads: Sequence[int]) -> Operator | None:
        if self.dropout_p:
            # further passes drop what the first one dropped, in every head
            return None
        return AttentionOperator(
            take_heads(self.q, heads),
            take_heads(repeat_heads(self.k, self.q), heads),
            None if self.attn_mask is None else take_heads(self.attn_mask, heads),
            is_causal=self.is_causal,
            scale=self.scale,
            backend=self.backend,
        )

    def dense(self) -> Tensor:
        # the map before any dropout: drawing a mask here would be another than the one applied
        with _no_autocast(self.q.device):
            return DenseOperator.from_qk(
                self.q, self.k, self.attn_mask, self.is_causal, self.scale
            ).dense()

    def which(self, coeffs: Tensor, v: Tensor) -> Choice:
        """What :meth:`polynomial` runs for these arguments, and why; computes nothing."""
        v, coeffs = self._prepare(v), _check_coefficients(coeffs, self.q)
        return self._choose(v, coeffs.shape[-1] - 1)

    def _prepare(self, v: Tensor) -> Tensor:
        _check_kinds(v=v)
        (v,) = _autocast(v)
        _check(self.q, self.k, v, self.attn_mask, self.dropout_p, self.enable_gqa)
        return v

    def _choose(self, v: Tensor, degree: int) -> Choice:
        call = Call(
            self.q,
            self.k,
            v,
            self.attn_mask,
            self.dropout_p,
            self.is_causal,
            degree,
            self.dropout_after,
        )
        return choose(self.backend, call)

    def _chosen(self, v: Tensor, degree: int) -> Operator:
        backend = self._choose(v, degree).backend
        if backend == "dense":
            return self._dense()
        return self._fused() if backend == "fused" else self._sdpa()

    def _fused(self) -> Operator:
        # Triton is imported where its kernels run
        from gfsa.operators.fused.operator import FusedOperator

        return FusedOperator(
            self.q,
            self.k,
            self.attn_mask,
            self.dropout_p,
            self.is_causal,
            self.scale,
            self.enable_gqa,
        )

    def _sdpa(self) -> SDPAOperator:
        return SDPAOperator(
            self.q,
            self.k,
            self.attn_mask,
            self.dropout_p,
            self.is_causal,
            self.scale,
            self.enable_gqa,
        )

    def _dense(self) -> DenseOperator:
        return DenseOperator.from_qk(
            self.q,
            self.k,
            self.attn_mask,
            self.is_causal,
            self.scale,
            dropout_p=self.dropout_p,
            dropout_after=self.dropout_after,
        )


def which_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: Backend = "auto",
) -> Choice:
    """What :func:`graph_filter_attention` runs for these arguments, and why; computes nothing."""
    operator = AttentionOperator(q, k, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend)
    return operator.which(coeffs, v)


def linear_graph_filter_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    r"""Efficient Attention with a polynomial of its map, in time and memory linear in N.

    .. math:: y_h = \sum_{k=0}^{m} c_{h,k}\,A_h^k\,v_h,
              \qquad A = \rho_{row}(q)\,\rho_{col}(k)^\top

    Args:
        q, k, v: ``(..., H, N, D)``; v's head dim may differ.
        coeffs: ``(H, m+1)`` or ``(m+1,)``, lowest power first. Any degree costs about the same.
        key_padding_mask: bool ``(..., N)`` over the batch dimensions, True where a token is
            padding (the convention of :class:`torch.nn.MultiheadAttention`).

    Returns:
        ``(..., H, N, D_v)`` in v's dtype. Rows of padding tokens are finite and mean nothing.
    """
    _check_kinds(q=q, k=k, v=v, key_padding_mask=key_padding_mask)
    q, k, v = _autocast(q, k, v)
    _check(q, k, v, attn_mask=None, dropout_p=0.0, enable_gqa=False)
    coeffs = _check_coefficients(coeffs, q)
    if key_padding_mask is not None:
        if q.dim() < 3:
            raise ValueError("key_padding_mask needs inputs with a head dimension, (..., H, N, D)")
        expected = (*q.shape[:-3], q.shape[-2])
        if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != expected:
            raise ValueError(
                f"expected a bool key_padding_mask of shape {tuple(expected)}, True for padding, "
                f"got {key_padding_mask.dtype} of shape {tuple(key_padding_mask.shape)}"
            )
    with _no_autocast(q.device):
        return LinearOperator(q, k, key_padding_mask).polynomial(coeffs, v)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast has done its casts; from here on precision is the operators' business."""
    if torch.compiler.is_compiling() or (
        _has_autocast(device.type) and torch.is_autocast_enabled(device.type)
    ):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _has_autocast(device: str) -> bool:
    # the compiler cannot trace the question, and compiles for no device without autocast
    return torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)


def _autocast(*tensors: Any) -> Any:
    """Cast as autocast casts the arguments of torch's own attention; the first says where."""
    device = tensors[0].device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def _check_kinds(**tensors: Any) -> None:
    for name, value in tensors.items():
        optional = name.endswith("mask")
        if not (isinstance(value, Tensor) or (optional and value is None)):
            raise TypeError(
                f"{name} must be a tensor{' or None' if optional else ''}, "
                f"got {type(value).__name__}"
            )


def _check_options(dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> None:
    number = (int, float, torch.SymInt, torch.SymFloat)
    for name, value in (("dropout_p", dropout_p), ("scale", 1.0 if scale is None else scale)):
        if not isinstance(value, number):
            raise TypeError(f"{name} must be a number, got {value!r}")
    for name, value in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(value, (bool, torch.SymBool)):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def _check(
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


def _check_coefficients(coeffs: Tensor, q: Tensor) -> Tensor:
    """The coefficients in the precision in which sums are kept."""
    _check_kinds(coeffs=coeffs)
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
    return coeffs.to(at_least_float32(coeffs.dtype))
