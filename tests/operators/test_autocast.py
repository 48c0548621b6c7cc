"""Arguments are cast as autocast casts those of torch's own attention."""

import torch

from gfsa.operators.autocast import autocast


def test_nothing_is_cast_outside_of_autocast() -> None:
    x, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    assert autocast(x, None, mask) == (x, None, mask)


def test_floating_point_is_cast_and_the_rest_left_alone() -> None:
    x, low = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    double, mask = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        found = autocast(x, low, double, mask, None, x)
    assert [None if y is None else y.dtype for y in found] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float64,
        torch.bool,
        None,
        torch.bfloat16,
    ]
    # what has the right dtype already is itself
    assert found[1] is low
    assert found[2] is double
    assert found[3] is mask


def test_a_device_without_autocast() -> None:
    x = torch.ones(2, device="meta")
    assert autocast(x) == (x,)
