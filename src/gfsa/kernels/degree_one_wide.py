r"""The gradient of degree 1 by cuDNN's attention gradient, for wide heads of long causal rows.

.. math::
    dU = c_1 g, \qquad (dq, dk, A^\top dU) = \mathrm{attend}'(dU;\, q, k, V, U), \qquad
    dV = c_0 g + A^\top dU

Beyond 4,096 tokens of head dim 128 cuDNN's five products, and what is done around them, take less
time than the seven of own kernels. One kernel before it computes dU, c0·g and the coefficients'
gradients from g, U and V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gfsa.kernels.degree_one import gradient_launch
from gfsa.kernels.layout import empty_like, result_strides
from gfsa.kernels.problem import Options


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    u: Tensor,
    lse: Tensor,
    coeffs: Tensor,
    mask: None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, and partial sums of the coefficients' ``(H, 2, any number)``.

    Args:
        lse: natural logsumexps, ``(B, H, N)``.
    """
    launch = gradient_launch(u, v, coeffs.shape[1])
    # in the layout that attention's output has for such queries
    dv, du = empty_like(v), torch.empty_like(q)
    parts = coeffs.new_empty(u.shape[1], 2, u.shape[0] * launch.grid[0])
    launch((g, v, u, dv, du), coeffs, parts)
    u = laid_out(u, du.stride())
    dq, dk, first = attention_gradient(du, q, k, v, u, lse, options)
    torch.add(first, dv, out=dv)
    return _as(dq, q), _as(dk, k), dv, parts


def _as(x: Tensor, like: Tensor) -> Tensor:
    """``x``, or a copy that is laid out as results of the kernels are."""
    return x if x.stride() == result_strides(like) else empty_like(like).copy_(x)


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``x``, or a copy with these strides.

    Torch looks cuDNN's plan for a gradient up by the layouts of q, k and v. The layouts of the
    output and its gradient have to follow from those, or torch silently runs the plan of another
    layout.
    """
    dims = zip(x.shape, x.stride(), strides, strict=True)
    if all(size == 1 or stride == wanted for size, stride, wanted in dims):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def attention_gradient(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """cuDNN's; ``g`` and ``out`` as :func:`laid_out` lays them out for q, k and v."""
    length = q.shape[2]
    # the random state, of which dropout alone has need
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    # contiguous strides, also if it is a slice of a larger tensor
    lse = lse.reshape(-1).view(*q.shape[:3], 1)
    gradients: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, out, lse, unused, unused, None, None, None, length, length, 0.0,
        options.is_causal, scale=options.scale,
    )  # fmt: skip
    return gradients
