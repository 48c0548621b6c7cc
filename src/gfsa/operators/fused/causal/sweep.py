"""The causal filter and its gradient by one sweep each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.fused.causal.backward import grad_columns
from gfsa.operators.fused.causal.forward import filter_rows
from gfsa.operators.fused.causal.plan import (
    ColumnPlan,
    RowPlan,
    column_plans,
    row_plan,
    takes_wave,
)
from gfsa.operators.fused.kernel import Kernel, Launch, empty_like, multiprocessors
from gfsa.operators.fused.passes import Options, Problem, padded, problem_of, sum_groups


def refusal(options: Options) -> str | None:
    """The reason why one sweep cannot serve a call, or None if it can."""
    if not options.is_causal:
        return "one sweep needs a causal mask"
    if options.mask is not None:
        return "one sweep takes no mask beside the causal one"
    if options.dropout_p:
        return "one sweep takes no dropout"
    if options.scale <= 0.0:
        return f"one sweep takes positive scales only, got {options.scale}"
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    options: Options,
    plan: RowPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, U, LSE)``, as :func:`gfsa.operators.fused.passes.forward`."""
    problem = problem_of(q, k, options)
    plan = plan or row_plan(problem.head_dim, _takes_wave(problem))
    out, u = empty_like(q), empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    total = problem.batch * problem.heads
    progress = _progress(q, total + 1, plan.wave)
    launch = _row_launch(problem, plan, u.stride()[:3])
    launch((q, k, v, k, v, out), u, lse, coeffs, progress)
    return out, u, lse


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    out: Tensor,
    lse: Tensor,
    coeffs: Tensor,
    options: Options,
    plans: Sequence[ColumnPlan] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`gfsa.operators.fused.passes.backward`."""
    problem = problem_of(q, k, options)
    plans = plans or column_plans(problem.head_dim, _takes_wave(problem))
    batch, heads, length, head_dim = q.shape
    # room for the tallest blocks, a multiple of all others
    rows = _rounded_up(length, max(plan.rows for plan in plans))
    shape = (batch, heads, rows, padded(head_dim))
    dq_sum = torch.empty(shape, dtype=torch.float32, device=q.device)
    du = torch.empty(shape, dtype=q.dtype, device=q.device)
    delta = torch.empty_like(lse)
    values = next(plan for plan in plans if plan.values)
    dc = lse.new_empty(heads, 3, batch * (-(-length // values.rows)))
    # a row of k and v for each query head; heads that share keys are added up below
    grouped = q.shape[1] != k.shape[1]
    dq = empty_like(q)
    dk, dv = (empty_like(q if grouped else x) for x in (k, v))
    for plan in plans:
        blocks = -(-length // plan.rows)
        progress = _progress(q, batch * heads * blocks + 1, plan.wave)
        tiles = (q, g, k, v, u, g, out, dq, dk, dv)
        launch = _column_launch(problem, plan, rows)
        launch(tiles, lse, coeffs, du, delta, dq_sum, dc, progress)
    return dq, sum_groups(dk, k), sum_groups(dv, v), dc


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _takes_wave(problem: Problem) -> bool:
    return takes_wave(problem.batch * problem.heads, multiprocessors(problem.device))


def _progress(q: Tensor, numbers: int, wave: bool) -> Tensor:
    """Flags and a counter of tickets, all zero; not read without a wave."""
    room = torch.zeros if wave else torch.empty
    return room(numbers, dtype=torch.int32, device=q.device)


_ROWS = Kernel(filter_rows)
_COLUMNS = Kernel(grad_columns)


@functools.lru_cache(maxsize=1024)
def _row_launch(problem: Problem, plan: RowPlan, strides: tuple[int, int, int]) -> Launch:
    total = problem.batch * problem.heads
    blocks = -(-problem.length // plan.rows)
    return Launch(
        _ROWS,
        (total * blocks if plan.wave else total, 1, 1),
        (problem.variant, plan.warps, *_specialised(*strides)),
        _blocks(_ROWS, plan, problem.head_dim),
        (problem.heads, problem.group, problem.length, problem.scale, *strides, total),
        (
            padded(problem.head_dim),
            problem.head_dim,
            plan.rows,
            plan.cols,
            plan.stages,
            plan.wave,
        ),
        num_warps=plan.warps,
    )


@functools.lru_cache(maxsize=1024)
def _column_launch(problem: Problem, plan: ColumnPlan, rows: int) -> Launch:
    total = problem.batch * problem.heads
    blocks = -(-problem.length // plan.rows)
    return Launch(
        _COLUMNS,
        (total * blocks if plan.wave else total, 1, 1),
        (problem.variant, plan.warps),
        _blocks(_COLUMNS, plan, problem.head_dim),
        (problem.heads, problem.group, problem.length, problem.scale, total, rows),
        (
            padded(problem.head_dim),
            plan.rows,
            plan.cols,
            plan.stages,
            plan.wave,
            plan.chunk,
            plan.values,
            plan.scores,
            plan.atomic,
        ),
        num_warps=plan.warps,
    )


def _blocks(
    kernel: Kernel, plan: RowPlan | ColumnPlan, head_dim: int
) -> list[tuple[int, int, int, int]]:
    """The tiles of a kernel's tensors, which are named by the side that they are on."""
    sides = {"_rows": plan.rows, "_cols": plan.cols}
    names = inspect.signature(kernel.function.fn).parameters
    return [(1, 1, sides[name[-5:]], padded(head_dim)) for name in names if name[-5:] in sides]


def _specialised(*numbers: int) -> tuple[Any, ...]:
    """What Triton's compiled code depends on in a number that it is given."""
    return tuple((x % 16 == 0, x == 1, x >= 2**31) for x in numbers)
