"""bfloat16 and float16: no less precise than ordinary attention in the same dtype.

FlashAttention's rule allows a kernel twice the error of the plain formula in the same dtype,
gradients two to three times, both against a high-precision reference that starts from the same
rounded inputs. "Plain" can be read in two ways here, and both are tested:

- the *same function* in that dtype, H built from powers of A: errors compare directly, the
  largest one for outputs;
- *ordinary attention*, torch's own kernel in that dtype: another function, whose outputs have
  another size (A averages, so A·v is smaller than v, and A²·v smaller still), so each error is
  taken relative to the size of its own exact result. Root mean squares, because the largest error
  of an output rounded to a few bits jumps by factors of two with its binade.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa import graph_filter_attention
from support.attention import BACKENDS, published_form, rms

FILTERS = {
    "identity at init": [0.0, 1.0, 0.0],
    "just moved": [0.0, 1.0, 1e-3],
    "square": [0.0, 0.0, 1.0],
    "mixed": [0.3, 0.5, 0.2],
    "twicing": [0.0, 2.0, -1.0],
    "laplacian": [1.0, -1.0],
    "pagerank": [0.15, 0.1275, 0.108, 0.092, 0.522],
}


def draw(dtype: torch.dtype, sharpness: float) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, and the gradient of the output."""
    sizes = (sharpness, sharpness, 1.0, 1.0)
    *inputs, cotangent = ((torch.randn(2, 4, 128, 32) * size).to(dtype) for size in sizes)
    return inputs, cotangent


def run(attend, inputs: list[Tensor], cotangent: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients to q, k and v, computed in ``dtype``."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    y = attend(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent.to(dtype))]


@pytest.mark.parametrize("coeffs", [torch.tensor(c) for c in FILTERS.values()], ids=FILTERS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_flash_attentions_rule(
    coeffs: Tensor, is_causal: bool, dtype: torch.dtype, sharpness: float
) -> None:
    inputs, cotangent = draw(dtype, sharpness)

    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    def published(q, k, v):
        return published_form(q, k, v, coeffs, is_causal)

    def filtered(q, k, v, backend="sdpa"):
        return graph_filter_attention(q, k, v, coeffs, is_causal=is_causal, backend=backend)

    exact = run(published, inputs, cotangent, torch.float64)
    formula = run(published, inputs, cotangent, dtype)
    ordinary = run(plain, inputs, cotangent, dtype)
    ordinary_exact = run(plain, inputs, cotangent, torch.float64)
    for backend in BACKENDS:
        ours = run(lambda *x, b=backend: filtered(*x, backend=b), inputs, cotangent, dtype)
        assert ours[0].dtype == dtype
        assert (ours[0] - exact[0]).abs().max() <= 2 * (formula[0] - exact[0]).abs().max()
        for index, (mine, truth) in enumerate(zip(ours, exact, strict=True)):
            allowance = 2 if index == 0 else 3
            error = rms(mine - truth)
            assert error <= allowance * rms(formula[index] - truth)
            reference = ordinary_exact[index]
            theirs = rms(ordinary[index] - reference) / rms(reference)
            assert error / rms(truth) <= allowance * theirs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per head"])
def test_gradient_of_a_tiny_coefficient_is_whole(
    backend: str, dtype: torch.dtype, shared: bool
) -> None:
    """dc_k = Σ⟨g, A^k v⟩ does not know how small c_k is; only the rounding of A^k v shows."""
    (q, k, v), g = draw(dtype, 1.0)
    numbers = torch.tensor([0.0, 1.0, 1e-3, -1e-4])
    coeffs = (numbers if shared else numbers.expand(4, 4)).clone().requires_grad_()
    y = graph_filter_attention(q, k, v, coeffs, backend=backend)
    (gradient,) = torch.autograd.grad(y, coeffs, g)
    assert gradient.dtype == torch.float32

    attention = (q.double() @ k.double().mT / 32**0.5).softmax(-1)
    power = v.double()
    for degree in range(4):
        axes = None if shared else (0, 2, 3)
        exact = (g.double() * power).sum(axes)
        room = torch.finfo(dtype).eps * (g.double() * power).abs().sum(axes)
        assert ((gradient[..., degree] - exact).abs() <= room).all()
        power = attention @ power


def test_under_autocast_the_specification_keeps_float32() -> None:
    """Autocast casts what torch's attention casts, and nothing inside."""
    q, k, v = (torch.randn(2, 3, 32, 8) for _ in range(3))
    coeffs = torch.tensor([0.3, 1.0, -0.4])
    for backend in BACKENDS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = graph_filter_attention(q, k, v, coeffs, backend=backend)
        cast = [x.bfloat16() for x in (q, k, v)]
        assert torch.equal(y, graph_filter_attention(*cast, coeffs, backend=backend))
