"""Metrics and spectra against numpy and the dense map."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gfsa.lens import measure
from gfsa.operators import (
    AttentionCall,
    AttentionOperator,
    DenseOperator,
    FunctionOperator,
    LinearOperator,
    Operator,
    SDPAOperator,
)
from support.attention import Dispatched, reference_filter, reference_map


def by_definition(x: np.ndarray) -> dict[str, float]:
    """Every metric of ``(n, d)`` tokens as the docs define it, in plain loops where they help."""
    count = len(x)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = [unit[i] @ unit[j] for i in range(count) for j in range(count) if i != j]
    sigma = np.linalg.svd(x, compute_uv=False)
    share = sigma / sigma.sum()
    share = share[share > 0]
    return {
        "cosine": float(np.mean(pairs)) if pairs else math.nan,
        "residual": float(np.linalg.norm(x - x.mean(0)) / np.linalg.norm(x)),
        "norm": float(np.linalg.norm(x, axis=1).mean()),
        "rank": float(np.exp(-(share * np.log(share)).sum())),
    }


def measured(x: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
    return {
        "cosine": measure.cosine_similarity(x, valid),
        "residual": measure.rank_one_residual(x, valid),
        "norm": measure.token_norm(x, valid),
        "rank": measure.effective_rank(measure.singular_values(x, valid)),
    }


@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dim=st.integers(1, 12),
    left=st.booleans(),
)
def test_metrics_are_numpys_on_the_valid_tokens(
    seed: int, lengths: list[int], dim: int, left: bool
) -> None:
    torch.manual_seed(seed)
    most = max(lengths) + 2
    x = torch.randn(len(lengths), most, dim, dtype=torch.float64)
    position = torch.arange(most).flip(0) if left else torch.arange(most)
    valid = position < torch.tensor(lengths)[:, None]
    x[~valid] = math.nan
    got = measured(x, valid)
    for sample in range(len(lengths)):
        expected = by_definition(x[sample][valid[sample]].numpy())
        for name, value in expected.items():
            assert got[name][sample].item() == pytest.approx(value, rel=1e-6, abs=1e-7, nan_ok=True)


def test_a_collapsed_residual_keeps_its_digits_in_float32() -> None:
    x = torch.ones(1, 64, 32) + 1e-4 * torch.randn(1, 64, 32)
    expected = by_definition(x[0].double().numpy())["residual"]
    assert measure.rank_one_residual(x).item() == pytest.approx(expected, rel=1e-3)


def test_what_has_no_meaning_is_nan() -> None:
    assert measure.cosine_similarity(torch.randn(1, 1, 4)).isnan().all()
    assert measure.rank_one_residual(torch.zeros(1, 3, 4)).isnan().all()
    assert measure.effective_rank(torch.zeros(1, 3)).isnan().all()


def test_low_precision_is_summed_in_float32() -> None:
    x = torch.randn(2, 300, 64).bfloat16()
    expected = measure.cosine_similarity(x.double())
    torch.testing.assert_close(measure.cosine_similarity(x).double(), expected, atol=1e-6, rtol=0)


def test_singular_profile_reads_every_sample_on_its_own_length() -> None:
    values = torch.tensor([[8.0, 4.0, 2.0, 1.0, 0.5], [6.0, 3.0, 1.5, 0.0, 0.0]])
    profile = measure.singular_profile(values, torch.tensor([5, 3]), points=3)
    torch.testing.assert_close(profile, torch.tensor([[1, 0.25, 0.0625], [1, 0.5, 0.25]]))


@pytest.mark.parametrize("kind", ["identity", "uniform", "random"])
def test_dirichlet_energy(kind: str) -> None:
    length = 9
    x = torch.randn(2, length, 5, dtype=torch.float64)
    maps = {
        "identity": torch.eye(length, dtype=torch.float64),
        "uniform": torch.full((length, length), 1 / length, dtype=torch.float64),
        "random": torch.randn(length, length, dtype=torch.float64).softmax(-1),
    }
    attention = maps[kind]
    got = measure.dirichlet_energy(x, attention @ x)
    if kind == "identity":
        torch.testing.assert_close(got, torch.zeros(2, dtype=torch.float64))
    if kind == "uniform":
        torch.testing.assert_close(got, measure.rank_one_residual(x).square())
    laplacian = torch.eye(length, dtype=torch.float64) - (attention + attention.mT) / 2
    expected = torch.einsum("ij,bid,bjd->b", laplacian, x, x) / x.square().sum((1, 2))
    torch.testing.assert_close(got, expected)


DOUBLE = torch.float64


def dense_response(matrix: np.ndarray, valid: np.ndarray, frequencies: list[float]) -> np.ndarray:
    """``‖M·φ‖/‖φ‖`` of one head by its definition, on the rows and columns of valid tokens."""
    inside = matrix[np.ix_(valid, valid)]
    count = len(inside)
    gains = []
    for frequency in frequencies:
        whole = min(round(frequency * count), count // 2)
        mode = np.exp(2j * np.pi * whole / count * np.arange(count))
        gains.append(np.linalg.norm(inside @ mode) / np.linalg.norm(mode))
    return np.array(gains)


def uniform(length: int) -> Tensor:
    return torch.full((1, 1, length, length), 1 / length, dtype=DOUBLE)


@given(
    seed=st.integers(0, 2**16),
    length=st.integers(2, 11),
    dim=st.integers(1, 5),
    causal=st.booleans(),
    padded=st.booleans(),
)
def test_responses_are_those_of_the_dense_map(
    seed: int, length: int, dim: int, causal: bool, padded: bool
) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(2, 2, 3, length, dim, dtype=DOUBLE)
    v = torch.randn(2, 3, length, dim, dtype=DOUBLE)
    counts = torch.tensor([length, max(1, length - 2)])
    valid = torch.arange(length) < counts[:, None] if padded else None
    mask = None if valid is None else valid[:, None, None, :]
    coeffs = torch.randn(3, 3, dtype=DOUBLE)
    grid = measure.frequency_grid(length, 5)
    operator = AttentionOperator(q, k, mask, is_causal=causal)
    on_map, on_filter = measure.frequency_response(operator, v, coeffs, valid, grid)
    attention = reference_map(q, k, mask, causal)
    filtered = reference_filter(attention, coeffs)
    for sample in range(2):
        inside = np.ones(length, dtype=bool) if valid is None else valid[sample].numpy()
        for head in range(3):
            for got, matrix in ((on_map, attention), (on_filter, filtered)):
                expected = dense_response(matrix[sample, head], inside, grid.tolist())
                np.testing.assert_allclose(got[sample, head], expected, atol=1e-9)


def test_responses_build_no_map() -> None:
    length = 256
    q, k, v = torch.randn(3, 1, 2, length, 8)
    operator = AttentionOperator(q, k, backend="sdpa")
    with Dispatched() as dispatched:
        measure.frequency_response(
            operator, v, torch.tensor([[0.0, 1.0, 0.1]] * 2), None, measure.frequency_grid(length)
        )
    # the largest thing is the block of modes for all heads, far from 2·256²
    assert dispatched.largest < length * length


@pytest.mark.parametrize("kind", ["dense", "attention", "sdpa", "function", "linear"])
def test_dense_map_of_any_operator(kind: str) -> None:
    q, k, v = torch.randn(3, 2, 3, 7, 4, dtype=DOUBLE)
    attention = torch.from_numpy(reference_map(q, k))
    operators: dict[str, Operator] = {
        "dense": DenseOperator(attention),
        "attention": AttentionOperator(q, k),
        "sdpa": SDPAOperator(AttentionCall(q, k)),
        "function": FunctionOperator(lambda x: attention @ x),
        "linear": LinearOperator(q, k),
    }
    expected = operators["linear"].dense() if kind == "linear" else attention
    torch.testing.assert_close(measure.dense_map(operators[kind], v), expected)


@pytest.mark.parametrize("kind", ["attention", "sdpa", "linear"])
def test_autocast_and_half_precision_do_not_round_a_map(kind: str) -> None:
    q, k, v = (torch.randn(3, 2, 3, 40, 8) * 3).bfloat16()
    operators: dict[str, Operator] = {
        "attention": AttentionOperator(q, k),
        "sdpa": SDPAOperator(AttentionCall(q, k)),
        "linear": LinearOperator(q, k),
    }
    expected = torch.from_numpy(reference_map(q.double(), k.double())).float()
    expected = operators["linear"].dense() if kind == "linear" else expected
    with torch.autocast("cpu", torch.bfloat16):
        found = measure.dense_map(operators[kind], v)
    torch.testing.assert_close(found, expected)


def test_singular_values_of_maps_leave_padding_out() -> None:
    matrix = torch.randn(2, 3, 6, 6, dtype=DOUBLE).softmax(-1)
    valid = torch.arange(6) < torch.tensor([[6], [4]])
    got = measure.map_singular_values(matrix, valid)
    for head in range(3):
        inside = matrix[1, head, :4, :4].numpy()
        expected = np.linalg.svd(inside, compute_uv=False)
        np.testing.assert_allclose(got[1, head, :4], expected, atol=1e-7)
        np.testing.assert_allclose(got[1, head, 4:], 0, atol=1e-7)


def entropy_by_definition(row: np.ndarray) -> float:
    row = row[row > 0] / row.sum()
    return float(-(row * np.log(row)).sum())


@pytest.mark.parametrize("mask", ["none", "bool", "additive", "lowest"])
@pytest.mark.parametrize("causal", [False, True])
def test_entropy_is_that_of_the_dense_rows(mask: str, causal: bool) -> None:
    length = 7
    q, k, v = torch.randn(3, 2, 4, length, 5, dtype=DOUBLE)
    valid = torch.arange(length) < torch.tensor([[7], [5]])
    masks = {
        "none": None,
        "bool": valid[:, None, None, :],
        "additive": torch.randn(4, length, length, dtype=DOUBLE),
        "lowest": torch.zeros(2, 1, 1, length, dtype=DOUBLE).masked_fill(
            ~valid[:, None, None, :], torch.finfo(DOUBLE).min
        ),
    }
    given = masks[mask]
    counted = valid if mask in ("bool", "lowest") else None
    attention = reference_map(q, k, given, causal)
    operator = AttentionOperator(q, k, given, is_causal=causal)
    visible = operator.visibility().rows(0, length, length, q.device)
    nats, share = measure.attention_entropy(measure.dense_map(operator, v), visible, counted)
    for sample in range(2):
        rows = range(length if counted is None else int(valid[sample].sum()))
        for head in range(4):
            values = [entropy_by_definition(attention[sample, head, i]) for i in rows]
            seen = [int((attention[sample, head, i] > 0).sum()) for i in rows]
            assert nats[sample, head].item() == pytest.approx(np.mean(values))
            shares = [h / math.log(m) for h, m in zip(values, seen, strict=True) if m > 1]
            assert share[sample, head].item() == pytest.approx(np.mean(shares))


def test_entropy_of_closed_forms() -> None:
    nats, share = measure.attention_entropy(uniform(8))
    assert nats.item() == pytest.approx(math.log(8))
    assert share.item() == pytest.approx(1)
    nats, share = measure.attention_entropy(torch.eye(8, dtype=DOUBLE)[None, None])
    assert nats.item() == 0
    # a row that has one token only has no share
    assert share.isnan().all()
    # half of every row's weight: the entropy is that of the row made to sum to one
    nats, _ = measure.attention_entropy(uniform(8) / 2)
    assert nats.item() == pytest.approx(math.log(8))


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=5))
def test_verdicts_agree_with_a_fine_grid(coefficients: list[float]) -> None:
    numbers = torch.tensor(coefficients, dtype=DOUBLE)
    sigma = torch.linspace(0, 1, 20001, dtype=DOUBLE)[:-1]
    powers = sigma ** torch.arange(len(numbers))[:, None]
    difference = (numbers @ powers).abs() - numbers.sum().abs()
    clear = difference[difference.abs() > 1e-4]
    (said,) = measure.verdicts(numbers[None])
    # what the grid sees clearly, the verdict must say
    if said == "low-pass":
        assert (clear < 0).all()
    elif said == "high-pass":
        assert (clear > 0).all()
    elif said == "all-pass":
        assert len(clear) == 0
    if (clear > 0).any() and (clear < 0).any():
        assert said == "mixed"
