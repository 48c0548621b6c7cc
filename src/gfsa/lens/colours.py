"""One colour per method, the same in every figure and page."""

from __future__ import annotations

from collections.abc import Sequence

# Okabe and Ito's palette, without its yellow and black, then two more; line styles and markers
# differ as well, so that a figure survives a black-and-white printer. The page has the same order
# in lens.css
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#6A3D9A", "#7F7F7F"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

# by how a name begins, without spaces and capitals
_RESERVED = {"plain": 0, "gfsa": 1, "degree1": 2}


def series_of(names: Sequence[str]) -> list[int]:
    """The number of each name's colour: plain, GFSA and degree 1 always have their own.

    The other names take the numbers that are left, in order, and begin again after the last.
    """
    found: dict[str, int] = {}
    for name in names:
        plain = "".join(name.lower().split())
        for start, number in _RESERVED.items():
            if plain.startswith(start) and number not in found.values():
                found[name] = number
    # a colour that is reserved for a method which is not there is free, but is taken last
    free = sorted(range(len(COLOURS)), key=lambda number: number in _RESERVED.values())
    left = [number for number in free if number not in found.values()] or free
    others = [name for name in names if name not in found]
    found |= {name: left[at % len(left)] for at, name in enumerate(others)}
    return [found[name] for name in names]
