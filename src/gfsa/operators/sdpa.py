"""Attention by torch's own kernels: flash, cuDNN, memory-efficient, math, or the CPU's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.operators.base import Operator, take_heads
from gfsa.operators.dense import repeat_heads


class SDPAOperator(Operator):
    r"""``A·x`` as one call of :func:`torch.nn.functional.scaled_dot_product_attention`.

    No n×n tensor is made unless torch's kernel or the given mask makes one. The first pass over
    ``v`` is the very call that ordinary attention makes, so a filter of coefficients (0, 1, 0)
    gives the same bits.

    Attention dropout uses one mask for all passes, ``A`` being dropped once and then squared: the
    random generator is set back before each further pass, and ends where a single pass would
    leave it.

    Torch's kernels round ``A·v`` to the tokens' dtype before anything can be added to it, so in
    bfloat16 a term smaller than 2⁻⁹ of ``A·v`` does not show beside it (its gradient does).
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
    ) -> None:
        if attn_mask is not None:
            # torch takes no mask of fewer dimensions
            attn_mask = torch.atleast_2d(attn_mask)
        if is_causal and attn_mask is not None:
            # torch takes one or the other
            attn_mask, is_causal = _with_causal(attn_mask, q.shape[-2]), False
        if attn_mask is not None and attn_mask.dtype == torch.bool and q.is_cuda:
            # for a row without any key, cuDNN's attention answers a bool mask with an average of
            # values it must not see and NaN gradients, an additive mask with zeros
            attn_mask = as_additive(attn_mask, q.dtype)
        if scale is not None and scale < 0 and q.is_cuda:
            # cuDNN's attention answers a negative scale with NaN
            q, scale = -q, -scale
        self.q = q
        self.k = k
        self.attn_mask = attn_mask
        self.dropout_p = dropout_p
        self.is_causal = is_causal
        self.scale = scale
        self.enable_gqa = enable_gqa

    def apply(self, x: Tensor) -> Tensor:
        # A·v has a head for each query head, v perhaps fewer: keys follow whatever x has
        k = repeat_heads(self.k, x)
        # an if rather than the comparison itself: under dynamic shapes that is symbolic, bool()
        # or not, and torch takes no symbol here
        enable_gqa = False
        if self.enable_gqa and k.shape[-3] != self.q.shape[-3]:
            enable_gqa = True
        return F.scaled_dot_product_attention(
            self.q,
            k,
            x,
            attn_mask=self.attn_mask,
            dropout_p=self.dropout_p,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=enable_gqa,
        )

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        if self.dropout_p and degree > 1:
            # every pass on the same head layout, so that every pass runs the same kernel
            tokens = powers_with_one_mask(self.apply, repeat_heads(v, self.q), degree)
        else:
            tokens = super().powers(v, degree)
        # the identity's term needs v on every query head
        return [repeat_heads(tokens[0], self.q), *tokens[1:]]

    def second_pass(self, heads: Sequence[int]) -> Operator | None:
        if self.dropout_p:
            # further passes drop what the first one dropped, in every head
            return None
        return SDPAOperator(
            take_heads(self.q, heads),
            take_heads(repeat_heads(self.k, self.q), heads),
            None if self.attn_mask is None else take_heads(self.attn_mask, heads),
            is_causal=self.is_causal,
            scale=self.scale,
        )


def powers_with_one_mask(apply: Callable[[Tensor], Tensor], v: Tensor, degree: int) -> list[Tensor]:
    """``[v, A·v, …]`` for a kernel that draws its own dropout mask, the same one in each pass.

    The random generator ends where a single pass would have left it.
    """
    tokens = [v]
    before = _generator_state(v.device)
    for power in range(degree):
        if power:
            _set_generator_state(v.device, before)
        tokens.append(apply(tokens[-1]))
    return tokens


def as_additive(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask (True takes part) as numbers to add to the scores: log 1 = 0, log 0 = -inf."""
    return attn_mask.to(dtype).log()


def _with_causal(attn_mask: Tensor, length: int) -> Tensor:
    causal = torch.ones(length, length, dtype=torch.bool, device=attn_mask.device).tril()
    if attn_mask.dtype == torch.bool:
        return attn_mask & causal
    return attn_mask.masked_fill(~causal, -math.inf)


def _generator_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
