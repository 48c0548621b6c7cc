"""Packed rows and windows for the fused kernels, and what they must give."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gfsa.kernels.op import FusedOperator
from gfsa.operators import AttentionCall, DenseOperator, SDPAOperator, Visibility
from support.fused_cases import NAMES, Problem, error, surviving


def packed(*rows: Sequence[int], window: int | None = None) -> Visibility:
    """Documents of these lengths, row by row."""
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    documents = torch.stack(numbers)[:, None]
    return Visibility(causal=True, window=window, documents=documents, in_order=True)


@dataclass(frozen=True)
class Packed:
    """A causal call on rows of documents."""

    lengths: Sequence[Sequence[int]]
    """The lengths of the documents, row by row; each row has as many tokens."""
    heads: int = 2
    head_dim: int = 16
    key_heads: int = 0
    window: int | None = None
    dropout_p: float = 0.0
    projected: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    degree: int = 2

    def __str__(self) -> str:
        # rows of a hundred documents would make a long name
        rows = "+".join(
            "-".join(map(str, row)) if len(row) < 8 else f"{len(row)} of {sum(row)}"
            for row in self.lengths
        )
        options = (self.window, self.key_heads, self.dropout_p, self.projected, self.scale)
        degree = "" if self.degree == 2 else f" degree {self.degree}"
        return f"{rows} {self.heads}x{self.head_dim} {options} {self.dtype}{degree}"

    @property
    def length(self) -> int:
        (length,) = {sum(row) for row in self.lengths}
        return length

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, coefficients and the output's gradient."""
        sizes = (len(self.lengths), self.heads, self.length, self.head_dim, self.key_heads)
        problem = Problem(*sizes, projected=self.projected, dtype=self.dtype, device=self.device)
        q, k, v, coeffs, g = problem.tensors()
        return q, k, v, coeffs[:, : self.degree + 1].contiguous(), g

    def visible(self) -> Visibility:
        visible = packed(*self.lengths, window=self.window)
        assert visible.documents is not None
        return dataclasses.replace(visible, documents=visible.documents.to(self.device))

    def call(self, q: Tensor, k: Tensor, dropout_p: float = 0.0) -> AttentionCall:
        """Without dropout, unless it is asked for."""
        return AttentionCall(
            q,
            k,
            dropout_p=dropout_p,
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            visible=self.visible(),
        )


def run(packed: Packed, seed: int = 7) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernels give for one call, and what the specification gives in float64.

    Both as [out, dq, dk, dv, dc].
    """
    q, k, v, coeffs, g = packed.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    drop = packed.dropout_p
    if drop:
        # as the operator will draw it
        torch.manual_seed(seed)
        key = int(torch.randint(2**32, (1,), device=packed.device))
        torch.manual_seed(seed)
    out = FusedOperator(packed.call(q, k, drop)).polynomial(coeffs, v)
    got = [out, *torch.autograd.grad(out, inputs, g)]

    multiplier = None
    if drop:
        multiplier = surviving(*q.shape[:3], key, drop, packed.device).double() / (1 - drop)
    expected = specified(packed, inputs, g, multiplier)
    return [x.detach() for x in got], expected


def specified(
    packed: Packed, inputs: Sequence[Tensor], g: Tensor, multiplier: Tensor | None = None
) -> list[Tensor]:
    """What the specification gives in float64: the output, and the gradient of each input.

    Head by head: of 8,192 tokens the maps of one head take 3 GiB, and those of twelve would leave
    little of a GPU to the tests that run beside this one.

    Args:
        inputs: q, k, v and coefficients; without these, the first power of A.
        multiplier: of the maps, ``(B, H, N, N)``.
    """
    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v, *coeffs = exact
    group = q.shape[1] // k.shape[1]
    outputs, gradients = [], [torch.zeros_like(x) for x in exact]
    for head in range(q.shape[1]):
        own, shared = slice(head, head + 1), slice(head // group, head // group + 1)
        operator = DenseOperator.from_call(packed.call(q[:, own], k[:, shared]))
        if multiplier is not None:
            operator = DenseOperator(operator.matrix * multiplier[:, own])
        values = v[:, shared]
        y = operator.polynomial(coeffs[0][own], values) if coeffs else operator.apply(values)
        parts = torch.autograd.grad(y, exact, g[:, own].double())
        gradients = [whole + part for whole, part in zip(gradients, parts, strict=True)]
        outputs.append(y.detach())
    return [torch.cat(outputs, 1), *gradients]


def attention_errors(packed: Packed) -> list[float]:
    """Relative errors of torch's attention on such inputs, in their dtype: out, dq, dk, dv."""
    q, k, v, _, g = packed.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = SDPAOperator(packed.call(q, k)).apply(v)
    got = [out, *torch.autograd.grad(out, inputs, g)]
    expected = specified(packed, inputs, g)
    return [error(x, y) for x, y in zip(got, expected, strict=True)]


def assert_as_exact_as_attention(packed: Packed) -> None:
    """Outputs and gradients have at most twice the error of torch's attention.

    In a window of one token attention returns V without any error; a filtered V is rounded. So at
    least twice the error of the exact result, rounded, is allowed.
    """
    torch.manual_seed(1)
    got, expected = run(packed)
    rounded = [error(y.to(packed.dtype), y) for y in expected]
    least = [max(pair) for pair in zip(attention_errors(packed), rounded, strict=False)]
    # rounding of the inputs to the last product, where n is too small for errors to average
    floor = 0.2 * torch.finfo(packed.dtype).eps
    allowed = dict(zip(NAMES, [2 * e + floor for e in least], strict=False), dc=5e-3)
    size = max(x.norm().item() for x in expected)
    for name, x, y in zip(NAMES, got, expected, strict=True):
        assert torch.isfinite(x).all(), name
        # the gradient of q vanishes in a window of one token, but for the rounding of the output,
        # which δ is computed from: half a unit in its last place
        vanishes = y.norm().item() <= 1e-6 * size
        rounding = 0.5 * torch.finfo(packed.dtype).eps * size
        most = rounding if vanishes else max(allowed[name] * y.norm().item(), 1e-4 * size)
        assert (x.double() - y).norm().item() <= most, (name, error(x, y), allowed[name])
