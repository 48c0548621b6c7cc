"""What is ready for a signature is used for that signature alone; asked without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gfsa.bench.host import nothing_launched
from gfsa.operators.fused.ready import Ready, ready_for

BF16 = torch.bfloat16


def tokens(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


def ready(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Ready | None:
    return ready_for(q, k, v, mask, 0.0, False, 0.125)


def test_one_for_each_signature() -> None:
    x = tokens(2, 4, 40, 64)
    other_layout = tokens(2, 40, 4, 64).transpose(1, 2)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    with nothing_launched():
        first = ready(x, x, x)
        assert isinstance(first, Ready)
        assert ready(x.clone(), x, x) is first
        others = [
            ready(other_layout, x, x),
            ready(x, other_layout, x),
            ready(x, x, x, mask),
            ready(x, x, x, mask.expand(2, 1, 40, 40)),
            ready(x[:1], x[:1], x[:1]),
            ready(x[:, :, :39], x[:, :, :39], x[:, :, :39]),
        ]
        assert all(isinstance(each, Ready) for each in others)
        assert len({id(each) for each in [first, *others]}) == 7


def test_what_goes_the_longer_way() -> None:
    long, x = tokens(1, 2, 300, 64), tokens(1, 2, 40, 64)
    off_the_border = tokens(1, 2, 40, 65)[..., 1:]
    with nothing_launched():
        assert ready(long, long, long) is None
        assert ready(off_the_border, x, x) is None
        assert ready(x, x.expand(1, 2, 40, 64), x) is not None
        assert ready(x, tokens(1, 1, 40, 64).expand(1, 2, 40, 64), x) is None


def test_results_lie_as_the_tokens_do() -> None:
    q, k = tokens(2, 40, 4, 64).transpose(1, 2), tokens(2, 4, 40, 64)
    coeffs = torch.ones(4, 3)
    with nothing_launched():
        made = ready(q, k, k)
        assert made is not None
        out, u, lse = made.forward(q, k, k, coeffs, None)
        gradients = made.backward(out, q, k, k, u, out, lse, coeffs, None, None)
    assert out.stride() == u.stride() == q.stride()
    assert gradients is not None
    assert [x.stride() for x in gradients[:3]] == [x.stride() for x in (q, k, k)]
    assert gradients[3].shape == (4, 3, 2 * 64)


def test_saved_tensors_in_another_layout_are_noticed() -> None:
    """Hooks on saved tensors may copy them; strides that were settled no longer hold then."""
    x = tokens(2, 4, 40, 64)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool).expand(2, 1, 40, 40)
    coeffs = torch.ones(4, 3)
    with nothing_launched():
        made = ready(x, x, x, mask)
        assert made is not None
        out, u, lse = made.forward(x, x, x, coeffs, mask)
        kept = (x, x, x, u, out, lse, coeffs)
        assert made.backward(out, *kept, mask, None) is not None
        assert made.backward(out, *kept, mask.contiguous(), None) is None
        assert made.backward(out.sum().expand(out.shape), *kept, mask, None) is None
