"""Graph-filter attention of degrees 1 and 2 by fused GPU kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfsa.kernels import coefficients
from gfsa.kernels.autograd import filter_attention, needs_registered_operator
from gfsa.kernels.degree_one import combine_degree_one
from gfsa.kernels.one_pass import filter_once
from gfsa.kernels.problem import Options
from gfsa.kernels.routes import (
    OPERATION,
    Decision,
    Kernels,
    kernels_of,
    operation_of,
    situation_of_kernels,
    with_contiguous_rows,
)
from gfsa.operators.base import Coefficients, Operator
from gfsa.operators.call import AttentionCall
from gfsa.operators.sdpa import SDPAOperator
from gfsa.operators.visibility import Visibility


class FusedOperator(Operator):
    r"""``c0·V + c1·A·V + c2·A·(A·V)`` by the library's own GPU kernels, forward and backward.

    The second pass reuses the first one's logsumexp and combines the powers. No n×n tensor is
    made; besides what attention saves for its backward pass, ``A·V`` is saved.

    Which kernels run is decided in ``routes.py``. A filter of degree 1 is one pass with the
    combination at its end, which saves nothing more than attention, or the kernels of degree 2 with
    c2 = 0, or torch's attention with one launch each way around it.

    Single passes, :meth:`apply` and :meth:`powers`, are torch's own attention.

    Args:
        decision: the decision about this call, if it is made already.
    """

    def __init__(self, call: AttentionCall, decision: Decision | None = None) -> None:
        q, mask, scale = call.q, call.attn_mask, call.scale
        self.call = call
        self.decision = decision
        is_causal = call.is_causal
        if call.visible is not None:
            # routes lets causal windows and documents through alone
            mask, is_causal = call.visible.spans(q.shape[-2], q.device), True
        elif mask is not None:
            mask = with_contiguous_rows(mask, q.shape[-2])
        self.mask = mask
        # kernels are compiled for floats: an int would be compiled in, and serve other scales too
        self.options = Options(
            1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
            is_causal,
            float(call.dropout_p),
        )

    def apply(self, x: Tensor) -> Tensor:
        return SDPAOperator(self.call).apply(x)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        return SDPAOperator(self.call).powers(v, degree)

    def polynomial(
        self, coeffs: Tensor | Coefficients, v: Tensor, exclusive: Tensor | None = None
    ) -> Tensor:
        q, k = self.call.q, self.call.k
        if isinstance(coeffs, Coefficients):
            taken = exclusive is None and coefficients.takes(coeffs)
            if needs_registered_operator(q) or not taken:
                return self.polynomial(coeffs.value(), v, exclusive)
            powers = coeffs.base.shape[1]
        else:
            if coeffs.dim() == 1:
                coeffs = coeffs.expand(q.shape[1], -1)
            if coeffs.dtype != torch.float32:
                coeffs = coeffs.float()
            powers = coeffs.shape[1]
            if exclusive is not None:
                share = exclusive.float().expand(q.shape[1])
                coeffs = torch.cat((coeffs, share[:, None]), 1)
        options = self.options._replace(exclusive=exclusive is not None)
        operation, kernels = self._decided(powers - 1, options)
        if operation == "once":
            return filter_once(q, k, v, coeffs, self.mask, options, kernels)
        if operation == "around":
            return combine_degree_one(v, self.apply(v), coeffs, options.exclusive)
        if powers == 2 and not isinstance(coeffs, Coefficients):
            coeffs = torch.nn.functional.pad(coeffs, (0, 1))
        seed = None
        if self.options.dropout_p:
            # drawn on the device, so that each replay of a captured graph draws a new one
            seed = torch.randint(2**32, (1,), device=q.device)
        return filter_attention(q, k, v, coeffs, self.mask, seed, self.options, kernels)

    def _decided(self, degree: int, options: Options) -> tuple[str, Kernels | None]:
        """The operation, and its kernels unless the operation chooses them when it runs."""
        decision = self.decision
        q, mask = self.call.q, self.mask
        if needs_registered_operator(q):
            if degree == 2:
                return "filter", None
            return operation_of(situation_of_kernels(q, mask, *options, degree)), None
        if decision is None:
            kernels = kernels_of(situation_of_kernels(q, mask, *options, degree))
        else:
            kernels = Kernels(decision.route, decision.gradient)
        return OPERATION[kernels.forward], kernels

    def visibility(self) -> Visibility:
        return Visibility.from_call(self.call)
