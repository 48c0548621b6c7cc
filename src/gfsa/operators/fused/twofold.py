r"""The gradient by two of cuDNN's attention gradients, for long sequences of wide heads.

With W = A·U, the filter is two attentions, ``W = attend(q, k, U)`` and ``U = attend(q, k, V)``:

.. math::
    (dq_2, dk_2, c_2 z) = \mathrm{attend}'(c_2 g;\, q, k, U, W), \qquad dU = c_1 g + c_2 z, \\
    (dq_1, dk_1, A^\top dU) = \mathrm{attend}'(dU;\, q, k, V, U).

That is ten matrix products instead of eight, but at head dim 128 cuDNN runs them faster than
Triton's code can run eight. W is kept for it instead of the output.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.fused import elementwise, passes
from gfsa.operators.fused.kernel import Kernel, Launch, empty_like
from gfsa.operators.fused.passes import Options, Problem, cudnn_would_run, padded, problem_of

SHORTEST = 2048
ROWS = 64


def serves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> bool:
    """Whether this way is the faster one, measured on an H200."""
    if q.shape[3] <= 64 or q.shape[2] < SHORTEST:
        return False
    return cudnn_would_run(q, k, v, Options(scale, is_causal, mask, dropout_p))


def forward(
    q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(out, U, LSE, W)``."""
    w = empty_like(q)
    return *passes.forward(q, k, v, coeffs, options, w), w


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    w: Tensor,
    lse: Tensor,
    coeffs: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`gfsa.operators.fused.passes.backward`, from W instead of the output."""
    launches = _launches(problem_of(q, k, options))
    dw = empty_like(q)
    launches["scale"]((g, dw), coeffs)
    dq2, dk2, du = _attention_gradient(dw, q, k, u, w, lse, options)
    # memory is what this way costs: dU takes the place of z, and c2·g goes
    del dw
    launches["grad_first"]((g, du), coeffs)
    dq, dk, dv = _attention_gradient(du, q, k, v, u, lse, options)
    add_up = launches["add_up"]
    dc = lse.new_empty(q.shape[1], 3, q.shape[0] * add_up.grid[0])
    add_up((g, v, u, w, dq2, dk2, dq, dk, dv), coeffs, dc)
    return dq, dk, dv, dc


def _attention_gradient(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    length = q.shape[2]
    # without dropout nothing is random
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    gradients: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, out, lse.unsqueeze(3), unused, unused, None, None, None, length, length, 0.0,
        options.is_causal, scale=options.scale,
    )  # fmt: skip
    return gradients


# kernels, and how many tensors each one takes
_KERNELS = {
    "scale": (Kernel(elementwise.scale), 2),
    "grad_first": (Kernel(elementwise.grad_first), 2),
    "add_up": (Kernel(elementwise.add_up), 9),
}


@functools.lru_cache(maxsize=1024)
def _launches(problem: Problem) -> dict[str, Launch]:
    width = padded(problem.head_dim)
    return {
        name: Launch(
            kernel,
            (-(-problem.length // ROWS), problem.batch * problem.heads, 1),
            problem.variant,
            [(1, 1, ROWS, width)] * tensors,
            (problem.heads,),
            (ROWS, width),
            num_warps=4,
        )
        for name, (kernel, tensors) in _KERNELS.items()
    }
