"""Choose train, valid and test: by the names of files and folders, or by one reproducible split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import numpy as np

PARTS = ("train", "valid", "test")
_SPELLINGS = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
_TEST_SHARE = 0.1
_VALID_SHARE = 0.1
# a constant, not a setting: every run has the same parts
_SEED = 2024

Rows = dict[str, list[int]]


def part_named(word: str) -> str | None:
    """The part that a word is a name of: ``valid`` for ``val``."""
    return next((part for part, spelt in _SPELLINGS.items() if word.lower() in spelt), None)


def part_of(path: Path, root: Path) -> str | None:
    """The part that a file's name, or that of its folder, says: ``techdocs.train.txt.xz``."""
    relative = path.relative_to(root)
    words = [
        *(word.lower() for word in relative.parts[:-1]),
        *path.name.lower().replace("-", ".").replace("_", ".").split("."),
    ]
    for part, spelt in _SPELLINGS.items():
        if any(word in spelt for word in words):
            return part
    return None


def three_parts(
    found: Mapping[str, Sequence[int]],
    where: str,
    classes: Sequence[Hashable] | None = None,
    groups: Sequence[Hashable] | None = None,
    holdout: float = _VALID_SHARE,
) -> tuple[Rows, str]:
    """The rows to train, validate and test on, and a sentence on how they were chosen.

    Args:
        found: the rows of each part that the data names; ``{"train": all}`` if it names none.
        where: the data, for messages.
        classes: the class of each row, to have every class in each part.
        groups: the speaker of each row, to have no speaker in two parts.
        holdout: the share to validate on, of data that names no part for it; 0 for no ``valid``.
    """
    parts = {part: list(rows) for part, rows in found.items() if len(rows)}
    named = [part for part in PARTS if part in parts]
    if "train" not in parts:
        raise ValueError(
            f"{where} has a part for {', '.join(named) or 'nothing'}, but none to train on: name "
            "files or folders train, valid and test, or give one file without such a name, which "
            "is split for you"
        )
    if len(named) == len(PARTS):
        return {part: parts[part] for part in PARTS}, "the parts that it names"
    way = "by speaker, " if groups is not None else "at random, "
    way += "the same in every run"
    if groups is None and classes is not None:
        way += ", every class in the same share"
    shares = {"train": 1 - holdout, "valid": holdout}
    if len(named) == 1:
        shares = {"train": 1 - holdout - _TEST_SHARE, "valid": holdout, "test": _TEST_SHARE}
    shares = {part: share for part, share in shares.items() if share > 0}
    if "train" not in shares:
        raise ValueError(f"holdout={holdout} leaves nothing to train on")
    cut = _cut(parts["train"], shares, where, classes, groups)
    for part, rows in cut.items():
        if not rows:
            raise ValueError(
                f"{100 * shares[part]:g} % of {len(parts['train'])} examples of {where} leave "
                f"nothing for {part}; set another holdout"
            )
    percent = ", ".join(f"{100 * share:.3g} % {part}" for part, share in shares.items())
    if len(named) == 1:
        return cut, f"{percent}, {way}"
    if "test" in parts:
        return cut | {"test": parts["test"]}, f"its train is split: {percent}, {way}"
    return cut | {"test": parts["valid"]}, (
        f"there is no part test: its valid is reported as test, and its train is split: {percent}, "
        f"{way}"
    )


def _cut(
    rows: Sequence[int],
    shares: Mapping[str, float],
    where: str,
    classes: Sequence[Hashable] | None,
    groups: Sequence[Hashable] | None,
) -> Rows:
    if len(rows) < 10:
        raise ValueError(
            f"{where} has {len(rows)} examples to split, at least 10 are needed; give more, or a "
            "file for each of train, valid and test"
        )
    if groups is not None:
        chosen = [groups[row] for row in rows]
        part_of_group = _split_groups(chosen, shares, where)
        return {p: [row for row in rows if part_of_group[groups[row]] == p] for p in shares}
    kinds = None if classes is None else [classes[row] for row in rows]
    return {p: [rows[at] for at in places] for p, places in split(len(rows), shares, kinds).items()}


def split(
    count: int, shares: Mapping[str, float], classes: Sequence[Hashable] | None = None
) -> Rows:
    """Numbers below ``count`` in parts of the given shares, in increasing order.

    With classes, every class is spread over the parts in these shares, as far as its size allows.
    """
    order = np.random.default_rng(_SEED).permutation(count)
    # the place of each example among those of its class, from 0 to 1
    sizes = Counter(classes) if classes is not None else {None: count}
    seen: Counter[Hashable] = Counter()
    place = np.empty(count)
    for row in order.tolist():
        kind = classes[row] if classes is not None else None
        place[row] = (seen[kind] + 0.5) / sizes[kind]
        seen[kind] += 1
    ordered = order[np.argsort(place[order], kind="stable")]
    ends = np.round(np.cumsum(list(shares.values())) * count).astype(int)
    pieces = np.split(ordered, ends[:-1])
    return {part: sorted(piece.tolist()) for part, piece in zip(shares, pieces, strict=True)}


def _split_groups(
    groups: Sequence[Hashable], shares: Mapping[str, float], where: str
) -> dict[Hashable, str]:
    """The part of each group: the smaller parts are filled up first, in a fixed random order.

    Groups that are larger than such a part come last, the largest at the very end: a speaker of
    most utterances is trained on.
    """
    sizes = Counter(groups)
    if len(sizes) < len(shares):
        raise ValueError(f"{where} has {len(sizes)} groups, too few for {', '.join(shares)}")
    names = sorted(sizes, key=str)
    waiting = [names[at] for at in np.random.default_rng(_SEED).permutation(len(names)).tolist()]
    small = [part for part in shares if part != "train"]
    fitting = max((shares[part] for part in small), default=0.0) * len(groups)
    # taken from the end
    waiting.sort(key=lambda group: -max(sizes[group], fitting))
    found: dict[Hashable, str] = {}
    for number, part in enumerate(small):
        filled = 0
        # a group must be left for each part after this one
        while filled < shares[part] * len(groups) and len(waiting) > len(small) - number:
            group = waiting.pop()
            found[group] = part
            filled += sizes[group]
    return found | dict.fromkeys(waiting, "train")
