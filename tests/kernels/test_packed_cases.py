"""The specification of packed rows that GPU tests compare with: all heads, one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gfsa.operators import DenseOperator
from support.dropout import surviving
from support.packed_cases import Packed, specified
from support.sizes import LargestTensor

CASE = Packed([[20, 30, 14], [1, 63]], heads=4)


@pytest.mark.parametrize(
    "options",
    [{}, {"key_heads": 2}, {"key_heads": 1, "window": 9, "degree": 1}, {"dropout_p": 0.2}],
    ids=str,
)
def test_as_all_heads_together(options: dict[str, Any]) -> None:
    case = dataclasses.replace(CASE, **options)
    *inputs, g = (x.double() for x in case.tensors())
    multiplier = None
    if case.dropout_p:
        multiplier = surviving(2, 4, 64, 7, case.dropout_p, "cpu").double()
    found = specified(case, inputs, g, multiplier)
    q, k, v, coeffs = exact = [x.requires_grad_() for x in inputs]
    matrix = DenseOperator.from_call(case.call(q, k)).matrix
    y = DenseOperator(matrix if multiplier is None else matrix * multiplier).polynomial(coeffs, v)
    for mine, other in zip(found, [y, *torch.autograd.grad(y, exact, g)], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_no_tensor_of_the_maps_of_all_heads() -> None:
    """Of twelve heads of 8,192 tokens they took 31 GiB, and other tests found no room."""
    case = dataclasses.replace(CASE, lengths=[[100, 156]], head_dim=8)
    *inputs, g = case.tensors()
    with LargestTensor() as largest:
        specified(case, inputs, g)
        specified(case, inputs[:3], g)
    assert largest.bytes == 8 * 256 * 256
