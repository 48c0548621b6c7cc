"""Attention by torch's own kernels: flash, cuDNN, memory-efficient, math, or the CPU's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.operators.blocked import apply_described, as_additive
from gfsa.operators.call import AttentionCall
from gfsa.operators.operator import Operator, repeat_heads
from gfsa.operators.visibility import Visibility


class SDPAOperator(Operator):
    r"""``A·x`` as one call of :func:`torch.nn.functional.scaled_dot_product_attention`.

    No n×n tensor is made unless torch's kernel or the given mask makes one: a key mask together
    with causality, windows and documents are masked a block of queries at a time. The first pass
    over ``v`` is the same call as ordinary attention's, so a filter of coefficients (0, 1, 0)
    gives the same bits.

    Torch's kernels round ``A·v`` to the tokens' dtype before anything can be added to it, so in
    bfloat16 a term smaller than 2⁻⁹ of ``A·v`` does not show beside it (its gradient does).
    """

    def __init__(self, call: AttentionCall) -> None:
        self.given = call
        self._call: AttentionCall | None = None
        self._keys: Tensor | None = None

    @property
    def call(self) -> AttentionCall:
        """The call by arguments that torch takes; made when a pass needs it."""
        if self._call is None:
            self._call = _as_torch_takes_it(self.given)
        return self._call

    def apply(self, x: Tensor) -> Tensor:
        call = self.call
        if call.visible is not None:
            return apply_described(call, call.visible, x)
        if call.attn_mask is not None and call.enable_gqa:
            # torch's grouped-query kernels accept no mask; keys are repeated once for all passes
            x = repeat_heads(x, call.q)
            if self._keys is None:
                self._keys = repeat_heads(call.k, call.q)
        # A·v has a head for each query head, v perhaps fewer: keys get as many heads as x
        k = repeat_heads(call.k if self._keys is None else self._keys, x)
        # an if rather than the comparison itself: under dynamic shapes that is symbolic, bool()
        # or not, and torch takes no symbol here
        enable_gqa = False
        if call.enable_gqa and k.shape[-3] != call.q.shape[-3]:
            enable_gqa = True
        return F.scaled_dot_product_attention(
            call.q,
            k,
            x,
            attn_mask=call.attn_mask,
            dropout_p=call.dropout_p,
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=enable_gqa,
        )

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        if self.call.dropout_p and degree > 1:
            # every pass on the same head layout, so that every pass runs the same kernel
            return powers_with_one_mask(self.apply, repeat_heads(v, self.call.q), degree)
        return super().powers(v if degree else repeat_heads(v, self.call.q), degree)

    def second_pass(self, heads: Sequence[int]) -> Operator | None:
        # under dropout further passes drop the entries that the first one dropped, in every head
        return None if self.call.dropout_p else SDPAOperator(self.call.of_heads(heads))

    def visibility(self) -> Visibility:
        return Visibility.from_call(self.call)


def powers_with_one_mask(apply: Callable[[Tensor], Tensor], v: Tensor, degree: int) -> list[Tensor]:
    """``[v, A·v, …]`` for a kernel that draws its own dropout mask, the same in each pass.

    The random generator ends in the state in which a single pass leaves it.
    """
    on_host = v.device.type == "cpu"
    random: Any = torch.random if on_host else torch.get_device_module(v.device)
    where = () if on_host else (v.device,)
    tokens, before = [v], random.get_rng_state(*where)
    for power in range(degree):
        if power:
            random.set_rng_state(before, *where)
        tokens.append(apply(tokens[-1]))
    return tokens


def _as_torch_takes_it(call: AttentionCall) -> AttentionCall:
    """The same map by arguments for which torch's kernels are right, or by a description."""
    q, k, mask, dropout_p, causal, scale, enable_gqa, place, visible = call
    if visible is not None and not visible.needs_rows():
        mask, causal, visible = visible.mask, visible.causal, None
    if mask is not None:
        # torch takes no mask of fewer dimensions, and either a mask or causality
        mask = torch.atleast_2d(mask)
        is_bool = mask.dtype == torch.bool
        if causal and is_bool and mask.shape[-2] == 1:
            mask, causal, visible = None, False, Visibility.from_call(call)
        elif causal:
            size = q.shape[-2]
            allowed = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
            mask, causal = mask.masked_fill(~allowed, False if is_bool else -math.inf), False
    if mask is not None and mask.dtype == torch.bool and q.is_cuda:
        mask = as_additive(mask, q.dtype)
    if scale is not None and scale <= 0:
        # a scale times -inf of a hidden score: cuDNN's attention and torch's on a CPU give NaN
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
    return AttentionCall(q, k, mask, dropout_p, causal, scale, enable_gqa, place, visible)
