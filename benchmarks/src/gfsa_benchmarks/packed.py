"""Rows of packed documents against plain causal rows of equal work, and document by document."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.functional import graph_filter_attention, which_backend
from gfsa.kernels.routes import Backend, refusal_by_fused, situation_of
from gfsa.operators import AttentionCall, AttentionOperator, Visibility
from gfsa_benchmarks.case import Case, Setting, Shape, Variant, variant

# of a row's tokens: the shortest and the longest document that is drawn
SHORTEST, LONGEST = 1 / 128, 1 / 2


def packed(shape: Shape, setting: Setting) -> Case:
    """Documents of mixed lengths in rows of ``shape.tokens``, one after another.

    The reference are causal rows of one length, with as many tokens in all and as many pairs of a
    query and a key that it sees, both within a few per cent.
    """
    if shape.causal or shape.padded:
        raise ValueError(
            f"the packed suite takes neither causal nor padded shapes, got the shape {shape}"
        )
    documents = [document_lengths(shape.tokens, row) for row in range(shape.batch)]
    batch, length = equal_rows(documents)
    return Case(
        str(shape),
        [
            _causal("gfsa causal rows", batch, length, shape, setting),
            _plain("plain causal rows", batch, length, shape, setting),
            _together("gfsa", "fused", documents, shape, setting),
            _together("gfsa sdpa", "sdpa", documents, shape, setting),
            _alone("gfsa by document", documents, shape, setting),
            _causal("gfsa degree 1 causal rows", batch, length, shape, setting, degree=1),
            _together("gfsa degree 1", "fused", documents, shape, setting, degree=1),
        ],
    )


def document_lengths(tokens: int, seed: int) -> list[int]:
    """Lengths that fill a row; their logarithms are drawn uniformly."""
    draw = torch.Generator().manual_seed(seed)
    shortest, longest = max(1, int(tokens * SHORTEST)), max(1, int(tokens * LONGEST))
    lengths: list[int] = []
    while sum(lengths) < tokens:
        at = float(torch.rand((), generator=draw))
        drawn = round(math.exp(math.log(shortest) + at * math.log(longest / shortest)))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return lengths


def visible_pairs(lengths: Sequence[int]) -> int:
    """How many pairs of a query and a key that it sees such causal sequences have."""
    return sum(length * (length + 1) // 2 for length in lengths)


def equal_rows(documents: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many causal rows of which length have the work of packed rows, or a little less.

    T tokens in rows of n' have T·(n'+1)/2 visible pairs. Lengths are multiples of 64, which no
    kernel has to pad.
    """
    lengths = [length for row in documents for length in row]
    tokens = sum(lengths)
    wanted = 2 * visible_pairs(lengths) // tokens - 1
    length = min(tokens, max(64, wanted // 64 * 64))
    return max(1, round(tokens / length)), length


def _tokens(
    batch: int, length: int, shape: Shape, setting: Setting, degree: int = 2
) -> list[Tensor]:
    size = (batch, shape.heads, length, shape.dim)
    tokens = [setting.randn(*size).requires_grad_() for _ in range(3)]
    # none is zero, so that no operator can skip a term
    coeffs = torch.tensor([0.1, 0.8, 0.1])[: degree + 1].repeat(shape.heads, 1).to(setting.device)
    return [*tokens, coeffs.requires_grad_()]


def _causal(
    name: str, batch: int, length: int, shape: Shape, setting: Setting, degree: int = 2
) -> Variant:
    def run(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        return graph_filter_attention(q, k, v, coeffs, is_causal=True)

    inputs = _tokens(batch, length, shape, setting, degree=degree)
    q, k, v, coeffs = inputs
    backend = which_backend(q, k, v, coeffs, is_causal=True).backend
    return variant(name, backend, run, inputs)


def _plain(name: str, batch: int, length: int, shape: Shape, setting: Setting) -> Variant:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return variant(name, "torch", run, _tokens(batch, length, shape, setting)[:3])


def _together(
    name: str,
    backend: Backend,
    documents: Sequence[Sequence[int]],
    shape: Shape,
    setting: Setting,
    degree: int = 2,
) -> Variant:
    inputs = _tokens(shape.batch, shape.tokens, shape, setting, degree=degree)
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents]
    numbers = torch.stack(rows)[:, None].to(setting.device)

    def described() -> Visibility:
        # a new one each time: the spans are computed once for all layers, here for one
        return Visibility(causal=True, documents=numbers, in_order=True)

    q, k, v, _ = inputs
    call = AttentionCall(q, k, visible=described())
    if backend == "fused" and refusal_by_fused(situation_of(call, v, degree)):
        backend = "auto"

    def operator(q: Tensor, k: Tensor) -> AttentionOperator:
        return AttentionOperator(q, k, visible=described(), backend=backend)

    def run(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        return operator(q, k).polynomial(coeffs, v)

    return variant(name, operator(q, k).which(inputs[3], v).backend, run, inputs)


def _alone(
    name: str, documents: Sequence[Sequence[int]], shape: Shape, setting: Setting
) -> Variant:
    def run(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        rows = []
        for row, lengths in enumerate(documents):
            parts = zip(*(x[row, None].split(lengths, 2) for x in (q, k, v)), strict=True)
            alone = [graph_filter_attention(q, k, v, coeffs, is_causal=True) for q, k, v in parts]
            rows.append(torch.cat(alone, 2))
        return torch.cat(rows)

    inputs = _tokens(shape.batch, shape.tokens, shape, setting)
    q, k, v, coeffs = inputs
    backend = which_backend(q, k, v, coeffs, is_causal=True).backend
    return variant(name, backend, run, inputs)
