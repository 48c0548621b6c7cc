"""Graph-filter attention as functions: check the arguments, choose an operator, apply it."""

from __future__ import annotations

import torch
from torch import Tensor

from gfsa.kernels.routes import Backend, Decision
from gfsa.operators.attention import AttentionOperator
from gfsa.operators.call import (
    AttentionCall,
    autocast,
    check_call,
    check_coefficients,
    check_kinds,
    check_share,
    no_autocast,
)
from gfsa.operators.linear import LinearOperator


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
    exclusive: float | Tensor | None = None,
) -> Tensor:
    r"""Attention whose map A is replaced by a polynomial of A, with coefficients for each head.

    .. math:: y_h = \sum_{k=0}^{m} c_{h,k}\,A_h^k\,v_h,
              \qquad A = \mathrm{softmax}(\mathrm{scale}\cdot q k^\top + \mathrm{mask})

    It takes the arguments of :func:`torch.nn.functional.scaled_dot_product_attention`, and the
    coefficients. Coefficients (0, 1) or (0, 1, 0) are ordinary attention: to the bit where torch's
    own kernel does the first pass, to rounding with the fused kernels for short or causal
    sequences.

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
            ``"fused"``. A backend asked for by name runs or raises; :func:`which_backend` tells
            what ``"auto"`` chooses.
        exclusive: the share a of the exclusive term, a number or one for each query head,
            :math:`y_h - a_h\,p\,v_h` with
            :math:`p_i = \langle (A v)_i, v_i \rangle / \langle v_i, v_i \rangle`: with a = 1 and
            coefficients (0, 1) a token's output is orthogonal to its own value. p is 0 for a token
            whose v is zero or not finite.

    Returns:
        ``(..., H, N, D_v)`` in v's dtype (under autocast, in autocast's).

    Raises:
        TypeError: if an argument has the wrong type or dtype.
        ValueError: if shapes, devices or values do not fit, or the backend asked for by name
            cannot serve the call.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 4, 16, 8)           # (batch, heads, tokens, dim)
        >>> coeffs = torch.tensor([0.1, 0.8, 0.1])          # 0.1·v + 0.8·A·v + 0.1·A²·v
        >>> gfsa.graph_filter_attention(q, k, v, coeffs, is_causal=True).shape
        torch.Size([2, 4, 16, 8])
    """
    operator = AttentionOperator(q, k, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend)
    share = None if exclusive is None else check_share(exclusive, q)
    return operator.polynomial(coeffs, v, share)


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
    exclusive: float | Tensor | None = None,
) -> Decision:
    """Say which kernels :func:`graph_filter_attention` runs for these arguments, and why.

    Nothing is computed. The arguments are those of :func:`graph_filter_attention`. Under
    :func:`torch.no_grad` other kernels may run than with a gradient.

    Returns:
        The decision: ``backend`` says whose attention kernels run (``"dense"``, ``"sdpa"`` for
        torch's, ``"fused"``), ``route`` and ``gradient`` which ones, ``reason`` why, and
        ``rejected`` which were preferred and why they do not serve. ``print`` shows all of it.
    """
    operator = AttentionOperator(q, k, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend)
    return operator.which(coeffs, v, exclusive is not None)


def linear_graph_filter_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    r"""Efficient Attention whose map A is replaced by a polynomial of A, linear in N.

    .. math:: y_h = \sum_{k=0}^{m} c_{h,k}\,A_h^k\,v_h,
              \qquad A = \rho_{row}(q)\,\rho_{col}(k)^\top

    ρ_row is a softmax over the features of each query, ρ_col one over the tokens for each feature
    of the keys. Time and memory are linear in the number of tokens N.

    Args:
        q, k, v: ``(..., H, N, D)``; v's head dim may differ.
        coeffs: ``(H, m+1)`` or ``(m+1,)``, lowest power first. Any degree costs about the same.
        key_padding_mask: bool ``(..., N)`` over the batch dimensions, True where a token is
            padding (the convention of :class:`torch.nn.MultiheadAttention`).

    Returns:
        ``(..., H, N, D_v)`` in v's dtype (under autocast, in autocast's). Rows of padding tokens
        are finite and have no meaning.

    Raises:
        TypeError: if an argument has the wrong type or dtype.
        ValueError: if shapes, devices or values do not fit.
    """
    check_kinds(q=q, k=k, v=v, key_padding_mask=key_padding_mask)
    q, k, v = autocast(q, k, v)
    check_call(AttentionCall(q, k), v)
    coeffs = check_coefficients(coeffs, q)
    if key_padding_mask is not None:
        if q.dim() < 3:
            raise ValueError("key_padding_mask needs inputs with a head dimension, (..., H, N, D)")
        expected = (*q.shape[:-3], q.shape[-2])
        if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != expected:
            raise ValueError(
                f"expected a bool key_padding_mask of shape {tuple(expected)}, True for padding, "
                f"got {key_padding_mask.dtype} of shape {tuple(key_padding_mask.shape)}"
            )
    with no_autocast(q.device):
        return LinearOperator(q, k, key_padding_mask).polynomial(coeffs, v)
