"""What filters cost in time: a plugged and a plain call, measured by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def time_ratio(plugged: Callable[[], Any], plain: Callable[[], Any], rounds: int = 15) -> float:
    """The median time of ``plugged`` over that of ``plain``.

    It is the time of this process on the CPU, which other programs do not lengthen by taking turns
    with it. The calls alternate, so that whatever else they slow down, they slow down in both. The
    first call of each is not measured.
    """
    taken: tuple[list[float], list[float]] = ([], [])
    for measured in range(-1, rounds):
        for call, seconds in zip((plugged, plain), taken, strict=True):
            begun = time.process_time()
            call()
            if measured >= 0:
                seconds.append(time.process_time() - begun)
    first, second = map(statistics.median, taken)
    return first / second
