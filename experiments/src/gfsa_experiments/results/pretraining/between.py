"""What lies between two lengths of training: a line over the logarithm of the tokens.

Losses bend, so a line is read only between lengths that are at most :data:`APART` times apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

APART = 2.0
"""How many times as long the longer of two lengths may be."""


def are_near(tokens: float, others: float) -> bool:
    """Whether a line between these two lengths is read."""
    shorter, longer = sorted((tokens, others))
    return longer <= APART * shorter * (1 + 1e-9)


def loss_after(tokens: Sequence[float], losses: Sequence[float], at: float) -> float | None:
    """The loss of a curve after ``at`` tokens; None outside of it, and where its points are far.

    Args:
        tokens: rising.
    """
    x = np.asarray(tokens, float)
    if not len(x) or not x[0] <= at <= x[-1]:
        return None
    after = int(np.searchsorted(x, at))
    if x[after] == at:
        return float(losses[after])
    if not are_near(x[after - 1], x[after]):
        return None
    share = math.log(at / x[after - 1]) / math.log(x[after] / x[after - 1])
    return float(losses[after - 1] + share * (losses[after] - losses[after - 1]))


def tokens_to_reach(
    tokens: Sequence[float], losses: Sequence[float], target: float
) -> float | None:
    """The tokens after which a curve is at ``target`` or below for the first time; None if never.

    None, too, if that is between two points that are far apart.
    """
    x, y = np.asarray(tokens, float), np.asarray(losses, float)
    below = np.flatnonzero(y <= target)
    if not len(below):
        return None
    at = int(below[0])
    if at == 0:
        # before the first point nothing is known
        return float(x[0])
    if y[at] == target:
        return float(x[at])
    if not are_near(x[at - 1], x[at]):
        return None
    share = (y[at - 1] - target) / (y[at - 1] - y[at])
    return float(x[at - 1] * (x[at] / x[at - 1]) ** share)
