"""Efficient Attention in linear time, against its own n×n matrix."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gfsa import linear_graph_filter_attention
from support.attention import Dispatched, reference_filter, relative_error, tokens


def reference(q, k, v, coeffs, padding=None):
    """ρ_row(q)·ρ_col(k)ᵀ written out, its powers by matrix_power."""
    queries, keys = (x.detach().double().numpy() for x in (q, k))
    rows = np.exp(queries) / np.exp(queries).sum(-1, keepdims=True)
    columns = np.exp(keys)
    if padding is not None:
        columns = columns * ~padding.numpy()[..., None, :, None]
    total = columns.sum(-2, keepdims=True)
    columns = np.divide(columns, total, out=np.zeros_like(columns), where=total > 0)
    response = reference_filter(rows @ columns.swapaxes(-1, -2), coeffs)
    return torch.from_numpy(response @ v.detach().double().numpy())


@st.composite
def linear_cases(draw):
    torch.manual_seed(draw(st.integers(0, 2**16)))
    batch = draw(st.sampled_from([(), (1,), (2,), (0,), (2, 2)]))
    heads, length = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    dim, value_dim = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    degree = draw(st.integers(0, 5))
    layout = draw(st.sampled_from(["contiguous", "projected", "sliced"]))
    q, k = (tokens(*batch, heads, length, dim, layout=layout) for _ in range(2))
    v = tokens(*batch, heads, length, value_dim, layout=layout)
    coeffs = torch.randn((heads, degree + 1) if draw(st.booleans()) else (degree + 1,)).double()
    padding = torch.rand(*batch, length) < 0.4 if draw(st.booleans()) else None
    return q, k, v, coeffs, padding


@settings(max_examples=200)
@given(linear_cases())
def test_is_the_formula_in_linear_time(case) -> None:
    *arguments, padding = case
    y = linear_graph_filter_attention(*arguments, key_padding_mask=padding)
    expected = reference(*arguments, padding)
    assert y.shape == expected.shape
    assert relative_error(y, expected) <= 1e-12


def test_padding_changes_nothing_for_the_tokens() -> None:
    q, k, v = tokens(1, 3, 6, 4), tokens(1, 3, 6, 4), tokens(1, 3, 6, 5)
    coeffs = torch.randn(3, 4)
    short = linear_graph_filter_attention(q, k, v, coeffs)
    noise = [torch.cat([x, 50 * torch.randn_like(x)], dim=-2) for x in (q, k, v)]
    padding = torch.arange(12)[None] >= 6
    padded = linear_graph_filter_attention(*noise, coeffs, key_padding_mask=padding)
    assert relative_error(padded[..., :6, :], short) <= 1e-12
    assert padded.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_sequence_of_padding_alone(dtype: torch.dtype) -> None:
    q, k, v = (tokens(2, 3, 5, 4, dtype=dtype).requires_grad_() for _ in range(3))
    coeffs = torch.randn(3, 3, requires_grad=True)
    padding = torch.tensor([[True] * 5, [False] * 5])
    y = linear_graph_filter_attention(q, k, v, coeffs, key_padding_mask=padding)
    torch.testing.assert_close(y[0], (coeffs[:, :1, None] * v[0].to(coeffs.dtype)).to(dtype))
    y.square().sum().backward()
    for x in (q, k, v, coeffs):
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = (tokens(2, 3, 64, 8, dtype=dtype) for _ in range(3))
    coeffs = torch.tensor([0.3, 1.0, -0.5, 1e-3])
    y = linear_graph_filter_attention(q, k, v, coeffs)
    assert y.dtype == dtype
    exact = linear_graph_filter_attention(q.double(), k.double(), v.double(), coeffs)
    # half a unit in the last place of each entry, and a little for float32's own rounding
    half_unit = torch.finfo(dtype).eps / 2
    assert ((y.double() - exact).abs() <= half_unit * exact.abs() * 1.01 + 1e-6).all()


def test_gradcheck() -> None:
    q, k, v = (tokens(2, 2, 4, 3).requires_grad_() for _ in range(3))
    coeffs = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False, False, False, True], [False] * 4])

    def attend(q, k, v, coeffs):
        return linear_graph_filter_attention(q, k, v, coeffs, key_padding_mask=padding)

    torch.autograd.gradcheck(attend, (q, k, v, coeffs))
    torch.autograd.gradgradcheck(attend, (q, k, v, coeffs))


def test_makes_nothing_larger_than_the_tokens() -> None:
    n, dim = 512, 16
    q, k, v = (torch.randn(1, 2, n, dim, requires_grad=True) for _ in range(3))
    coeffs = torch.tensor([0.1, 1.0, 0.3, 0.2], requires_grad=True)
    with Dispatched() as dispatched:
        linear_graph_filter_attention(q, k, v, coeffs).sum().backward()
    assert dispatched.largest <= q.numel()


def test_under_autocast_the_output_is_autocasts_and_the_sums_are_not() -> None:
    q, k, v = (torch.randn(2, 3, 16, 8) for _ in range(3))
    coeffs = torch.tensor([0.3, 1.0, -0.5])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear_graph_filter_attention(q, k, v, coeffs)
    assert y.dtype == torch.bfloat16
    cast = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(y, linear_graph_filter_attention(*cast, coeffs))


def test_refuses_a_mask_it_would_misread_and_cross_attention() -> None:
    q, coeffs = torch.randn(2, 3, 5, 4), torch.ones(3)
    with pytest.raises(ValueError, match="cross-attention has no powers"):
        linear_graph_filter_attention(q, q[..., :4, :], q[..., :4, :], coeffs)
    with pytest.raises(ValueError, match=r"bool.*\(2, 5\), True for padding, got torch\.int64"):
        linear_graph_filter_attention(q, q, q, coeffs, torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"shape \(2, 5\).*got torch\.bool of shape \(5,\)"):
        linear_graph_filter_attention(q, q, q, coeffs, torch.zeros(5, dtype=torch.bool))
    flat = torch.randn(5, 4)
    with pytest.raises(ValueError, match=r"head dimension, \(\.\.\., H, N, D\)"):
        linear_graph_filter_attention(flat, flat, flat, coeffs, torch.zeros(5, dtype=torch.bool))


def test_transforms_of_functions() -> None:
    """vmap, forward mode, and gradients of many results at once."""
    q, k, v = (tokens(2, 2, 5, 3) for _ in range(3))
    coeffs = torch.randn(2, 3, dtype=torch.float64)

    def attend(q, coeffs):
        return linear_graph_filter_attention(q, k, v, coeffs).sum(-1)

    expected = torch.autograd.functional.jacobian(attend, (q, coeffs))
    for strategy in ("reverse-mode", "forward-mode"):
        found = torch.autograd.functional.jacobian(
            attend, (q, coeffs), vectorize=True, strategy=strategy
        )
        torch.testing.assert_close(found, expected)
    by_sample = torch.func.vmap(linear_graph_filter_attention, (0, 0, 0, None))(q, k, v, coeffs)
    torch.testing.assert_close(by_sample.sum(-1), attend(q, coeffs))
