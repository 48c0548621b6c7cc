"""The causal kernels compile for Hopper, GPU or not; ``pytest -s`` shows what they take."""

from __future__ import annotations

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.compiler import ASTSource  # noqa: E402

from gfsa.operators.fused.causal import plan  # noqa: E402
from gfsa.operators.fused.causal.backward import grad_columns  # noqa: E402
from gfsa.operators.fused.causal.forward import filter_rows  # noqa: E402
from operators.fused.test_compiles import compile_for_hopper  # noqa: E402

POINTERS = {
    **dict.fromkeys(["u", "du"], "*bf16"),
    **dict.fromkeys(["lse_in", "lse_out", "coeffs", "delta", "dq_sum", "dc_out"], "*fp32"),
    "progress": "*i32",
}
MOST_SHARED = 227 * 1024


def resources(kernel: Any, cut: Any, head_dim: int, constants: dict[str, Any]) -> tuple[int, int]:
    """Bytes of stack a thread and of shared memory a program."""
    sides = {"_rows": cut.rows, "_cols": cut.cols}
    types = {
        name: f"tensordesc<bf16[1, 1, {sides[name[-5:]]}, {head_dim}]>"
        for name in kernel.arg_names
        if name[-5:] in sides
    }
    sizes = {
        "D": head_dim, "BM": cut.rows, "BN": cut.cols, "STAGES": cut.stages, "WAVE": cut.wave,
        "group": 1, **constants,
    }  # fmt: skip
    usage = compile_for_hopper(ASTSource, kernel, {**POINTERS, **types}, sizes, cut.warps)
    print(kernel.__name__, head_dim, cut, usage)
    found = re.search(r"STACK:(\d+) shared (\d+)", usage)
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("wave", [False, True], ids=["head", "wave"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward(head_dim: int, wave: bool) -> None:
    cut = plan.row_plan(head_dim, wave)
    stack, shared = resources(filter_rows, cut, head_dim, {"HEAD_DIM": head_dim})
    assert shared <= MOST_SHARED
    # what is spilled is spilled around the loop over keys
    assert stack <= (0 if head_dim == 64 else 256)


@pytest.mark.parametrize("wave", [False, True], ids=["head", "wave"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_backward(head_dim: int, wave: bool) -> None:
    for cut in plan.column_plans(head_dim, wave):
        constants = {
            "CHUNK": cut.chunk, "VALUES": cut.values, "SCORES": cut.scores, "ATOMIC": cut.atomic
        }  # fmt: skip
        stack, shared = resources(grad_columns, cut, head_dim, constants)
        assert shared <= MOST_SHARED
        assert stack <= 512
