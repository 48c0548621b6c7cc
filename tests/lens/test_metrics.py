"""Feature metrics against numpy, one sample and one definition at a time, and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gfsa.lens import measure


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


def test_singular_values_are_numpys_for_wide_and_tall_tokens() -> None:
    for shape in ((5, 9), (9, 5), (6, 6)):
        x = torch.randn(2, *shape, dtype=torch.float64)
        expected = np.linalg.svd(x.numpy(), compute_uv=False)
        np.testing.assert_allclose(measure.singular_values(x).numpy(), expected, atol=1e-7)


def test_equal_tokens_are_collapsed() -> None:
    x = torch.randn(1, 1, 8).expand(2, 7, 8)
    got = measured(x, None)
    torch.testing.assert_close(got["cosine"], torch.ones(2))
    assert got["residual"].max() < 1e-6
    torch.testing.assert_close(got["rank"], torch.ones(2, dtype=torch.float64), atol=1e-4, rtol=0)


def test_orthonormal_tokens_are_as_far_apart_as_can_be() -> None:
    x = 3 * torch.linalg.qr(torch.randn(2, 8, 8, dtype=torch.float64)).Q
    got = measured(x, None)
    torch.testing.assert_close(got["cosine"], torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(got["rank"], torch.full((2,), 8.0, dtype=torch.float64))
    # n orthonormal vectors: ‖X‖² = n, n‖x̄‖² = 1
    expected = torch.full((2,), math.sqrt(7 / 8), dtype=torch.float64)
    torch.testing.assert_close(got["residual"], expected)
    torch.testing.assert_close(got["norm"], torch.full((2,), 3.0, dtype=torch.float64))


def test_a_collapsed_residual_keeps_its_digits_in_float32() -> None:
    x = torch.ones(1, 64, 32) + 1e-4 * torch.randn(1, 64, 32)
    expected = by_definition(x[0].double().numpy())["residual"]
    assert measure.rank_one_residual(x).item() == pytest.approx(expected, rel=1e-3)


def test_what_has_no_meaning_is_nan() -> None:
    assert measure.cosine_similarity(torch.randn(1, 1, 4)).isnan().all()
    assert measure.rank_one_residual(torch.zeros(1, 3, 4)).isnan().all()
    assert measure.effective_rank(torch.zeros(1, 3)).isnan().all()


def test_zero_tokens_are_similar_to_none() -> None:
    x = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]])
    assert measure.cosine_similarity(x).item() == pytest.approx(2 / 6)


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
    for sample in range(2):
        tokens = x[sample].numpy()
        symmetric = (attention.numpy() + attention.numpy().T) / 2
        total = 0.0
        for i in range(length):
            for j in range(length):
                total += (float(i == j) - symmetric[i, j]) * (tokens[i] @ tokens[j])
        assert got[sample].item() == pytest.approx(total / (tokens**2).sum())
