"""How launches are laid out: the order of blocks, and what compiled code depends on."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gfsa.kernels.hopper import backward_path as hopper_backward
from gfsa.kernels.operator import FusedOperator
from gfsa.kernels.problem import Options, problem_of
from gfsa.operators import AttentionCall


@pytest.mark.parametrize(
    ("shape", "options", "masked", "expected"),
    [
        ((4, 16, 4096, 128), Options(0.1, True), False, True),
        ((8, 32, 2048, 128), Options(0.1, True), False, True),
        ((8, 32, 2044, 128), Options(0.1, True), False, False),
        ((4, 16, 4096, 128), Options(0.1), False, False),
        ((4, 16, 4100, 128), Options(0.1, True), False, True),
        ((4, 16, 4100, 128), Options(0.1), False, False),
        ((4, 16, 4096, 128), Options(0.1), True, False),
        ((4, 16, 4096, 104), Options(0.1, True), False, False),
        ((4, 16, 4096, 128), Options(0.1, True), True, False),
        ((4, 16, 4096, 96), Options(0.1, True), False, False),
        ((4, 16, 4096, 64), Options(0.1, True), False, False),
    ],
    ids=str,
)
def test_dq_is_added_up_in_any_order_unless_bits_have_to_be_equal(
    shape: tuple[int, ...], options: Options, masked: bool, expected: bool
) -> None:
    """Long causal sequences of wide heads, without another mask."""
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    mask = torch.ones(shape[0], 1, 1, shape[2], dtype=torch.bool) if masked else None
    problem = problem_of(q, q, mask, options)
    assert hopper_backward.adds_up_queries(problem) is expected
    torch.use_deterministic_algorithms(True)
    try:
        assert not hopper_backward.adds_up_queries(problem)
    finally:
        torch.use_deterministic_algorithms(False)


def test_each_stride_of_64_bits_has_code_of_its_own() -> None:
    """Code whose first stride has 64 bits, the second 32, would cut a second one of 64."""
    q = torch.empty(2, 2, 16, 16, dtype=torch.bfloat16)
    memory = torch.empty(2**33, dtype=torch.bool, device="meta")
    far = 2**31
    variants = {
        problem_of(q, q, memory.as_strided((2, 2, 16, 16), strides), Options(0.1)).variant
        for strides in [(9, 9, 9, 1), (far, 9, 9, 1), (9, far, 9, 1), (far, far, 9, 1)]
    }
    assert len(variants) == 4


def test_integers_are_no_other_kernels() -> None:
    """Triton compiles the int 1 in, and the code would serve every other scale after it."""
    q = torch.empty(1, 1, 16, 16, dtype=torch.bfloat16)
    options = FusedOperator(AttentionCall(q, q, dropout_p=0, scale=1)).options
    assert options == Options(1.0, False, 0.0)
    assert type(options.scale) is float
    assert type(options.dropout_p) is float
