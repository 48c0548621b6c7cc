"""Calls of the fused kernels, and what they must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gfsa.kernels.launching import Options
from gfsa.kernels.op import FusedOperator, filter_attention
from gfsa.operators import AttentionCall, DenseOperator, SDPAOperator

MaskKind = Literal["none", "keys", "full", "per head"]
NAMES = ("out", "dq", "dk", "dv", "dc")
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Problem:
    """One call."""

    batch: int
    heads: int
    length: int
    head_dim: int
    key_heads: int = 0
    is_causal: bool = False
    mask: MaskKind = "none"
    dropout_p: float = 0.0
    projected: bool = False
    """Heads beside features in memory, as a linear layer leaves them."""
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, coefficients and the output's gradient."""
        key_heads = self.key_heads or self.heads
        q, k, v, g = (
            self._tokens(heads) for heads in (self.heads, key_heads, key_heads, self.heads)
        )
        coeffs = torch.tensor([0.3, 1.0, -0.6]) + 0.2 * torch.randn(self.heads, 3)
        return q, k, v, coeffs.to(self.device), g

    def _tokens(self, heads: int) -> Tensor:
        shape = (self.batch, heads, self.length, self.head_dim)
        if self.projected:
            shape = (self.batch, self.length, heads, self.head_dim)
        x = torch.randn(shape).to(self.device, self.dtype)
        return x.transpose(1, 2) if self.projected else x

    def bool_mask(self) -> Tensor | None:
        n = self.length
        if self.mask == "none":
            return None
        if self.mask == "keys":
            # each sequence a little shorter than the one before, the last one empty
            lengths = torch.linspace(n, 0, self.batch).int()
            mask = (torch.arange(n) < lengths[:, None])[:, None, None, :]
        else:
            mask = torch.rand(self.batch, self.heads if self.mask == "per head" else 1, n, n) < 0.6
            # a row that sees nothing
            mask[..., n // 2, :] = False
        return mask.to(self.device)


def run(problem: Problem, seed: int = 7) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernels give for one call, and what the specification gives in float64.

    Both as [out, dq, dk, dv, dc].
    """
    q, k, v, coeffs, g = problem.tensors()
    mask = problem.bool_mask()
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    drop = problem.dropout_p
    key = torch.tensor([seed], device=problem.device) if drop else None
    out = filter_attention(*inputs, mask, key, Options(scale, problem.is_causal, drop))
    got = [out, *torch.autograd.grad(out, inputs, g)]

    exact = [x.detach().double().requires_grad_() for x in inputs]
    operator = DenseOperator.from_qk(exact[0], exact[1], mask, problem.is_causal, scale)
    if drop:
        sizes = (problem.batch, problem.heads, problem.length)
        kept = surviving(*sizes, seed, drop, problem.device)
        operator = DenseOperator(operator.matrix * kept.double() / (1 - drop))
    out = operator.polynomial(exact[3], exact[2])
    expected = [out, *torch.autograd.grad(out, exact, g.double())]
    return [x.detach() for x in got], [x.detach() for x in expected]


def surviving(
    batch: int, heads: int, length: int, seed: int, dropout_p: float, device: str = "cpu"
) -> Tensor:
    """True where dropout keeps an entry of the map, written a second time.

    Philox2x32-7 on ``((i // 2)·⌈n/2⌉ + j // 2, b·H + h)``; the first word is for even i, its lower
    16 bits for even j.
    """
    pairs = (length + 1) // 2
    half = torch.arange(length, device=device) // 2
    low = (half[:, None] * pairs + half).flatten().expand(batch * heads, -1)
    high = torch.arange(batch * heads, device=device)[:, None].expand_as(low)
    key = seed & _LOW
    for _ in range(7):
        # the product of two 32-bit numbers in two halves: it does not fit into a signed int64
        upper, lower = low >> 16, low & 0xFFFF
        first = upper * 0xD256D193
        second = lower * 0xD256D193
        product_high = (first + (second >> 16)) >> 16
        product_low = ((first << 16) + second) & _LOW
        low, high = product_high ^ key ^ high, product_low
        key = (key + 0x9E3779B9) & _LOW
    odd = torch.arange(length, device=device) % 2
    shape = (batch * heads, length, length)
    word = torch.where(odd[:, None] == 1, high.reshape(shape), low.reshape(shape))
    number = (word >> (16 * odd)) & 0xFFFF
    return (number + 0.5 >= dropout_p * 65536).view(batch, heads, length, length)


def attention_errors(problem: Problem) -> list[float]:
    """Relative errors of torch's attention on such inputs, in their dtype: out, dq, dk, dv."""
    q, k, v, _, g = problem.tensors()
    mask = problem.bool_mask()
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    if scale < 0:
        # cuDNN's attention answers a negative scale with NaN
        q, scale = -q, -scale
    grouped = q.shape[1] != k.shape[1]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    operator = SDPAOperator(AttentionCall(q, k, mask, 0.0, problem.is_causal, scale, grouped))
    out = operator.apply(v)
    got = [out, *torch.autograd.grad(out, inputs, g)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = DenseOperator.from_qk(exact[0], exact[1], mask, problem.is_causal, scale).apply(exact[2])
    expected = [out, *torch.autograd.grad(out, exact, g.double())]
    return [error(x, y) for x, y in zip(got, expected, strict=True)]


def assert_as_exact_as_attention(problem: Problem, vanishing: float = 0.0) -> None:
    """Errors of at most twice those of torch's attention.

    Args:
        vanishing: results that are off by less, relative to the largest of them, count as right.
    """
    torch.manual_seed(1)
    got, expected = run(problem)
    # rounding of the inputs to the last product, where n is too small for errors to average
    floor = 0.2 * torch.finfo(problem.dtype).eps
    allowed = [*(2 * each + floor for each in attention_errors(problem)), 5e-3]
    size = max(x.norm().item() for x in expected)
    for name, x, y, most in zip(NAMES, got, expected, allowed, strict=True):
        assert torch.isfinite(x).all(), name
        negligible = (x.double() - y).norm().item() <= vanishing * size
        assert negligible or error(x, y) <= most, (name, error(x, y), most)


def outcome(work: Callable[..., Tensor], inputs: Sequence[Tensor], g: Tensor) -> list[Tensor]:
    """What ``work`` gives for the inputs, and their gradients."""
    y = work(*inputs)
    return [y, *torch.autograd.grad(y, inputs, g)]


def assert_same_bits(first: Sequence[Tensor], *others: Sequence[Tensor]) -> None:
    for other in others:
        for number, (x, y) in enumerate(zip(first, other, strict=True)):
            assert torch.equal(x, y), number


def assert_agree(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """To the rounding of float32."""
    size = max(x.norm().item() for x in expected)
    for name, x, y in zip(NAMES, got, expected, strict=True):
        assert x.shape == y.shape, name
        # a gradient that is zero but for rounding has no relative error of its own
        negligible = (x.double() - y).norm().item() <= 1e-6 * size
        assert negligible or error(x, y) <= 2e-6, (name, error(x, y))


def assert_learns_by_the_kernels(layer: Any, problem: Problem) -> None:
    """The coefficients and θ's gradient by kernels are those that torch works out."""
    q, k, v, _, g = problem.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v)] + [layer.theta]
    results = []
    for operator in (
        FusedOperator(AttentionCall(q, k, is_causal=problem.is_causal)),
        DenseOperator.from_qk(q, k, is_causal=problem.is_causal),
    ):
        y = layer(operator, v)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, g)])
        with torch.no_grad():
            assert error(layer(operator, v), y) == 0
    for name, mine, exact in zip(NAMES, *results, strict=True):
        assert mine.shape == exact.shape
        assert error(mine, exact) <= 2e-6, name


def error(got: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    size = expected.double().norm().clamp_min(1e-12)
    return ((got.double() - expected.double()).norm() / size).item()
