"""What holds for every filter of an attention graph, whatever its degree."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gfsa import graph_filter_attention, linear_graph_filter_attention
from support.attention import BACKENDS, relative_error, tokens

degrees = st.integers(0, 4)
seeds = st.integers(0, 2**16)
backends = st.sampled_from(BACKENDS)


def draw_inputs(seed: int, degree: int, length: int = 7) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    inputs = [tokens(2, 3, length, 4) for _ in range(3)]
    return [*inputs, torch.randn(3, degree + 1, dtype=torch.float64)]


@given(seeds, degrees, backends, st.booleans())
def test_constant_tokens_are_scaled_by_the_sum_of_the_coefficients(
    seed: int, degree: int, backend: str, is_causal: bool
) -> None:
    """The rows of A sum to one, so the rows of H sum to Σ c_k."""
    q, k, v, coeffs = draw_inputs(seed, degree)
    constant = v[..., :1, :].expand_as(v)
    y = graph_filter_attention(q, k, constant, coeffs, is_causal=is_causal, backend=backend)
    assert relative_error(y, coeffs.sum(-1)[:, None, None] * constant) <= 1e-12
    if not is_causal:
        y = linear_graph_filter_attention(q, k, constant, coeffs)
        assert relative_error(y, coeffs.sum(-1)[:, None, None] * constant) <= 1e-12


@given(seeds, degrees, backends, st.integers(1, 6))
def test_the_future_never_leaks(seed: int, degree: int, backend: str, now: int) -> None:
    """Powers of a causal map are causal: no later token changes an earlier one, by no bit."""
    q, k, v, coeffs = draw_inputs(seed, degree)
    before = graph_filter_attention(q, k, v, coeffs, is_causal=True, backend=backend)
    for x in (q, k, v):
        x[..., now:, :] += 1 + torch.rand_like(x[..., now:, :])
    after = graph_filter_attention(q, k, v, coeffs, is_causal=True, backend=backend)
    assert torch.equal(before[..., :now, :], after[..., :now, :])
    assert not torch.equal(before[..., now:, :], after[..., now:, :])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_comes_from_the_future(backend: str) -> None:
    q, k, v, coeffs = draw_inputs(0, 3)
    for x in (q, k, v):
        x.requires_grad_()
    y = graph_filter_attention(q, k, v, coeffs, is_causal=True, backend=backend)
    y[..., :3, :].square().sum().backward()
    for x in (q, k, v):
        assert x.grad[..., :3, :].any()
        assert not x.grad[..., 3:, :].any()


@given(seeds, degrees, backends)
def test_tokens_in_another_order_give_the_same_in_that_order(
    seed: int, degree: int, backend: str
) -> None:
    q, k, v, coeffs = draw_inputs(seed, degree)
    order = torch.randperm(7)
    shuffled = [x[..., order, :] for x in (q, k, v)]
    y = graph_filter_attention(q, k, v, coeffs, backend=backend)
    moved = graph_filter_attention(*shuffled, coeffs, backend=backend)
    assert relative_error(moved, y[..., order, :]) <= 1e-12
    y = linear_graph_filter_attention(q, k, v, coeffs)
    moved = linear_graph_filter_attention(*shuffled, coeffs)
    assert relative_error(moved, y[..., order, :]) <= 1e-12


@given(seeds, degrees, backends, st.integers(0, 4), st.sampled_from(["left", "right"]))
def test_padding_changes_nothing(
    seed: int, degree: int, backend: str, pads: int, side: str
) -> None:
    q, k, v, coeffs = draw_inputs(seed, degree)
    y = graph_filter_attention(q, k, v, coeffs, backend=backend)
    real = torch.ones(7, dtype=torch.bool)
    noise = 10 * torch.randn(3, 2, 3, pads, 4, dtype=torch.float64)
    hidden = torch.zeros(pads, dtype=torch.bool)
    order = (lambda a, b: [b, a]) if side == "left" else (lambda a, b: [a, b])
    padded = [torch.cat(order(x, junk), -2) for x, junk in zip((q, k, v), noise, strict=True)]
    keep = torch.cat(order(real, hidden))
    z = graph_filter_attention(*padded, coeffs, keep[None, None, None, :], backend=backend)
    assert relative_error(z[..., keep, :], y) <= 1e-12


@settings(max_examples=50)
@given(seeds, backends)
def test_linear_in_values_and_in_coefficients(seed: int, backend: str) -> None:
    q, k, v, coeffs = draw_inputs(seed, 3)
    w, others = torch.randn_like(v), torch.randn_like(coeffs)

    def attend(values: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return graph_filter_attention(q, k, values, numbers, backend=backend)

    y = attend(v, coeffs)
    assert relative_error(attend(v + 2 * w, coeffs), y + 2 * attend(w, coeffs)) <= 1e-12
    assert relative_error(attend(v, coeffs + 2 * others), y + 2 * attend(v, others)) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: str) -> None:
    q, k, v, coeffs = (x.float().requires_grad_() for x in draw_inputs(0, 2))
    y = graph_filter_attention(q * 1e4, k * 1e4, v, coeffs, backend=backend)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(math.isfinite(x.grad.abs().sum()) for x in (q, k, v, coeffs))
