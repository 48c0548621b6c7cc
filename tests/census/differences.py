"""How far two runs of a model are apart, in outputs and in gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class WrongError(Exception):
    """The plugged model differs from the reference."""


def difference(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest number of the same tensor."""
    got, expected = comparable(got, expected)
    if [y.shape for y in got] != [y.shape for y in expected]:
        raise WrongError(
            f"outputs {[tuple(y.shape) for y in got]} instead of "
            f"{[tuple(y.shape) for y in expected]}"
        )
    largest = 0.0
    for mine, theirs in zip(got, expected, strict=True):
        finite = theirs.isfinite()
        if not torch.equal(mine.isfinite(), finite):
            raise WrongError("not finite where the reference is, or the other way round")
        if not finite.any():
            continue
        mine, theirs = mine[finite].double(), theirs[finite].double()
        scale = max(theirs.abs().max().item(), 1e-3)
        largest = max(largest, (mine - theirs).abs().max().item() / scale)
    return largest


def comparable(*runs: list[Tensor]) -> tuple[list[Tensor], ...]:
    """Without the maps that some models return unasked, if an attention function returns them."""
    if len({len(outputs) for outputs in runs}) == 1:
        return runs
    return tuple(
        [y for y in outputs if y.dim() != 4 or y.shape[-1] != y.shape[-2]] for outputs in runs
    )


def agree(got: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    # where lengths are predicted, filters may change the shapes as well
    try:
        return difference(got, expected) <= tolerance
    except WrongError:
        return False


def gradient_differences(
    got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """Differences by name, relative to the largest number of the gradient.

    A gradient that is much smaller than the largest one of the model is measured by that: it may be
    a sum of large terms (of the keys' bias, say, whose gradient is zero but for rounding).
    """
    sizes = [
        g.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        for g in expected.values()
        if g is not None and g.numel()
    ]
    largest = max(sizes, default=0.0)
    found = {}
    for name, theirs in expected.items():
        mine = got[name]
        if (theirs is None) != (mine is None):
            raise WrongError(f"the gradient of {name} is missing on one side")
        if theirs is None or mine is None or not theirs.numel():
            continue
        if not torch.equal(mine.isfinite(), theirs.isfinite()):
            raise WrongError(f"the gradient of {name} is not finite where the reference's is")
        # rows without any key may be NaN in the model itself
        finite = theirs.isfinite()
        if not finite.any():
            continue
        mine, theirs = mine[finite].double(), theirs[finite].double()
        scale = max(theirs.abs().max().item(), 3e-2 * largest, 1e-30)
        found[name] = (mine - theirs).abs().max().item() / scale
    return found


def loss_of(outputs: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=torch.float64)
    for y in outputs:
        weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        # rows without any key may be NaN or infinite in the model itself
        total = total + (torch.where(y.isfinite(), y, 0).double() * weights).sum()
    return total
