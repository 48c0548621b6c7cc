"""The forward kernel of degree 1 in one pass, in the interpreter; its gradient is Gluon's.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gfsa.kernels import degree_one_launch, tile_access
from gfsa.kernels.degree_one_launch import Tiles
from gfsa.kernels.layout import copyable_by_tile
from gfsa.kernels.problem import Options
from gfsa.operators import DenseOperator
from support.fused_cases import Problem

assert support.triton_interpreter

PROBLEMS = [
    Problem(1, 2, 70, 16),
    Problem(1, 2, 70, 24, is_causal=True, projected=True),
    Problem(1, 1, 130, 64, is_causal=True),
    Problem(1, 4, 20, 16, key_heads=2, is_causal=True, scale=0.7),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def run(problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """The output and the logsumexps to base 2, by the kernel and in float64."""
    q, k, v, coeffs, _ = problem.tensors()
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    coeffs = coeffs[:, :2].contiguous()
    out, _, lse = degree_one_launch.forward(
        q, k, v, coeffs, None, Options(scale, problem.is_causal)
    )
    q, k, v, coeffs = (x.double() for x in (q, k, v, coeffs))
    operator = DenseOperator.from_qk(q, k, None, problem.is_causal, scale)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if problem.is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    exact = scores.logsumexp(-1) / math.log(2)
    return [out, lse[:, :, 0, : q.shape[2]]], [operator.polynomial(coeffs, v), exact]


def agrees(got: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y).norm() <= 2e-6 * max(y.norm(), 1e-3)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_agrees_with_the_specification(problem: Problem) -> None:
    agrees(*run(problem))


def test_one_token() -> None:
    agrees(*run(Problem(1, 1, 1, 8)))


@pytest.fixture
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows, cols = request.param
    monkeypatch.setattr(degree_one_launch, "tiles", lambda *_: Tiles(rows, cols, 4, 2))
    degree_one_launch._launch.cache_clear()
    yield
    degree_one_launch._launch.cache_clear()


@pytest.mark.parametrize("tiles", [(16, 32), (32, 16)], indirect=True, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.usefixtures("tiles")
def test_tiles_of_any_size(is_causal: bool) -> None:
    agrees(*run(Problem(1, 1, 50, 24, is_causal=is_causal)))


@pytest.mark.parametrize("problem", PROBLEMS[1:2], ids=str)
def test_on_a_gpu_without_a_copy_engine(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """By addresses instead of descriptors the kernels give the same bits."""
    expected, _ = run(problem)
    monkeypatch.setattr(tile_access, "has_copy_engine", lambda x: False)
    torch.manual_seed(0)
    for x, y in zip(run(problem)[0], expected, strict=True):
        assert torch.equal(x, y)


def test_every_block_of_every_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the programs take them: two heads together, then the one that is left."""
    problem = Problem(1, 3, 70, 16, is_causal=True)
    monkeypatch.setattr(degree_one_launch, "_heads_together", lambda problem: 2)
    degree_one_launch._launch.cache_clear()
    agrees(*run(problem))
    degree_one_launch._launch.cache_clear()


def test_heads_together_fill_the_cache() -> None:
    problem = degree_one_launch.problem_of
    q = torch.empty(8, 12, 1024, 64, dtype=torch.bfloat16, device="meta")
    together = degree_one_launch._heads_together
    assert together(problem(q, q, None, Options(0.1))) == 1
    assert together(problem(q, q, None, Options(0.1, is_causal=True))) == 96
    q = torch.empty(64, 12, 1024, 64, dtype=torch.bfloat16, device="meta")
    assert together(problem(q, q, None, Options(0.1, is_causal=True))) == 96


def test_contiguous_and_off_the_border() -> None:
    """A view into a buffer may be contiguous and begin anywhere."""
    x = torch.randn(1 + 2 * 3 * 5 * 16)[1:].view(2, 3, 5, 16)
    assert x.is_contiguous()
    assert x.data_ptr() % 16
    y = copyable_by_tile(x)
    assert y.data_ptr() % 16 == 0
    assert torch.equal(x, y)
