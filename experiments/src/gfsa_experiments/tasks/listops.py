"""ListOps of the Long Range Arena: nested lists of operators and digits, read or generated.

The value of ``[MAX 4 3 [MIN 2 3 ] 1 0 ]`` is 4. The official rules: an operator has 2 to 10
arguments, each an operator with probability 1/4 and a digit otherwise, at depth 10 (the root has
depth 1) always a digit; operators are MIN, MAX, MED (the median, rounded down) and SM (the sum
modulo 10); lists of more than 500 and fewer than 2,000 tokens are kept (so the root is always an
operator), without duplicates; 96,000 to train on, 2,000 to validate on, 2,000 to test on.

Trees are drawn level by level in numpy, some thousands at once.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from gfsa_experiments.data.files import check_count, find_file, read_npz, source_of
from gfsa_experiments.data.tables import open_table, usable_rows
from gfsa_experiments.engine.whole_files import write_whole

COUNTS = {"train": 96_000, "val": 2_000, "test": 2_000}
SHORTEST, LONGEST = 501, 1_999
DEEPEST = 10
MOST_ARGUMENTS = 10
OPERATOR_SHARE = 0.25
# trees drawn at once; about a sixth have a valid length
_DRAWN = 4_000

PAD = 0
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
TOKENS = ("<pad>", *map(str, range(10)), *OPERATORS, "]")
_DIGIT, _OPERATOR, _CLOSE = 1, 11, 15


@dataclass(frozen=True)
class Sequences:
    """Concatenated sequences of small tokens, with a label each."""

    tokens: np.ndarray
    """uint8."""
    offsets: np.ndarray
    """Sequence i is ``tokens[offsets[i]:offsets[i + 1]]``."""
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @classmethod
    def of(cls, lists: Iterable[tuple[bytes, int]]) -> Sequences:
        """Sequences from the tokens and the label of each."""
        tokens, labels = zip(*lists, strict=True)
        offsets = np.cumsum([0, *map(len, tokens)])
        return cls(np.frombuffer(b"".join(tokens), np.uint8), offsets, np.array(labels, np.uint8))


def make_listops(seed: int = 0, counts: dict[str, int] | None = None) -> dict[str, Sequences]:
    """The parts of the data set of this ``seed``."""
    counts = COUNTS if counts is None else counts
    found: dict[bytes, int] = {}
    for sequence, label in _draw(np.random.default_rng(seed)):
        found.setdefault(sequence.tobytes(), label)
        if len(found) == sum(counts.values()):
            break
    lists = iter(found.items())
    return {name: Sequences.of(itertools.islice(lists, count)) for name, count in counts.items()}


@dataclass
class _Level:
    """The nodes of all trees at one depth; children of one parent are consecutive."""

    tree: np.ndarray
    arguments: np.ndarray
    """How many; 0 for a digit."""
    symbol: np.ndarray
    """The digit, or the number of the operator."""

    def of(self, trees: np.ndarray) -> _Level:
        kept = trees[self.tree]
        return _Level(self.tree[kept], self.arguments[kept], self.symbol[kept])


def _draw(generator: np.random.Generator) -> Iterator[tuple[np.ndarray, int]]:
    """An endless stream of sequences of valid length and their values."""
    while True:
        levels = _grow(generator)
        lengths = np.zeros(_DRAWN, dtype=np.int64)
        for level in levels:
            # a digit is one token, an operator two: itself and its closing bracket
            weights = np.where(level.arguments > 0, 2, 1)
            lengths += np.bincount(level.tree, weights, _DRAWN).astype(np.int64)
        kept = (lengths >= SHORTEST) & (lengths <= LONGEST)
        levels = [level.of(kept) for level in levels]
        values, spans = _evaluate(levels)
        offsets = np.cumsum([0, *lengths[kept]])
        tokens = _spell(levels, spans, offsets)
        for start, end, value in zip(offsets[:-1], offsets[1:], values, strict=True):
            yield tokens[start:end], int(value)


def _grow(generator: np.random.Generator) -> list[_Level]:
    """Trees with an operator at their root, level by level."""
    tree = np.arange(_DRAWN)
    levels = []
    for depth in range(1, DEEPEST + 1):
        count = len(tree)
        is_operator = generator.random(count) <= OPERATOR_SHARE
        if depth == 1:
            is_operator[:] = True
        elif depth == DEEPEST:
            is_operator[:] = False
        arguments = generator.integers(2, MOST_ARGUMENTS + 1, count) * is_operator
        digits = generator.integers(0, 10, count)
        operators = generator.integers(0, len(OPERATORS), count)
        levels.append(_Level(tree, arguments, np.where(is_operator, operators, digits)))
        tree = np.repeat(tree, arguments)
    return levels


def _evaluate(levels: list[_Level]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The value of each tree, and for each node the number of tokens of its subtree."""
    values, spans = np.empty(0, np.int64), [np.empty(0, np.int64)]
    for level in reversed(levels):
        value, span = level.symbol.copy(), np.ones(len(level.symbol), np.int64)
        at = np.flatnonzero(level.arguments)
        if len(at):
            count = level.arguments[at]
            starts = np.cumsum(count) - count
            group = np.repeat(np.arange(len(at)), count)
            # sorted within each group, so that MIN, MAX and MED are positions in it
            ordered = np.sort(group * 10 + values) % 10
            middle = ordered[starts + (count - 1) // 2] + ordered[starts + count // 2]
            results = (
                ordered[starts],
                ordered[starts + count - 1],
                middle // 2,
                np.add.reduceat(values, starts) % 10,
            )
            value[at] = np.choose(level.symbol[at], results)
            span[at] = np.add.reduceat(spans[0], starts) + 2
        values = value
        spans.insert(0, span)
    return values, spans[:-1]


def _spell(levels: list[_Level], spans: list[np.ndarray], offsets: np.ndarray) -> np.ndarray:
    """The tokens of all trees, each starting at its offset."""
    tokens = np.zeros(offsets[-1], dtype=np.uint8)
    begin = offsets[:-1]
    for depth, (level, span) in enumerate(zip(levels, spans, strict=True)):
        is_operator = level.arguments > 0
        tokens[begin] = level.symbol + np.where(is_operator, _OPERATOR, _DIGIT)
        tokens[begin[is_operator] + span[is_operator] - 1] = _CLOSE
        if depth + 1 < len(levels):
            count = level.arguments[is_operator]
            below = spans[depth + 1]
            # an argument begins after its operator and the preceding arguments
            before = np.cumsum(below) - below
            first = np.repeat(before[np.cumsum(count) - count], count) if len(count) else before
            begin = np.repeat(begin[is_operator], count) + 1 + before - first
    return tokens


_GENERATED = "listops_seed0.npz"
_ARRAYS = ("tokens", "offsets", "labels")
# only words and brackets count: parentheses repeat the structure
_CODES = {token: code for code, token in enumerate(TOKENS) if code}


@functools.lru_cache(maxsize=2)
def read_listops(data_dir: Path) -> dict[str, Sequences]:
    """``train``, ``val`` and ``test``; generated and stored if they do not exist."""
    source = source_of("listops")
    paths: dict[str, Path] = {}
    for part in COUNTS:
        try:
            paths[part] = find_file(data_dir, [f"basic_{part}.tsv"], source)
        except FileNotFoundError:
            # one part without the others is a mistake
            if paths:
                raise
            break
    else:
        return {part: _read_tsv(path, COUNTS[part]) for part, path in paths.items()}
    stored = [folder / _GENERATED for folder in (data_dir, data_dir / "listops")]
    path = next((path for path in stored if path.is_file()), stored[-1])
    if not path.is_file():
        _generate(path)
    try:
        # the npz format has a checksum for each array
        arrays = read_npz(path, [f"{name}_{part}" for part in COUNTS for name in _ARRAYS])
    except ValueError as error:
        raise ValueError(f"{error}, or delete it to generate it again") from error
    return {part: Sequences(*(arrays[f"{name}_{part}"] for name in _ARRAYS)) for part in COUNTS}


def _read_tsv(path: Path, official: int) -> Sequences:
    """Columns Source and Target."""
    rows = usable_rows(path, open_table(path), ("Source", "Target"), ("", ""))
    check_count(path, len(rows), official)
    found = []
    for source, target in rows:
        words = source.replace("(", " ").replace(")", " ").split()
        if not set(words) <= _CODES.keys() or not 0 < len(words) <= LONGEST:
            raise ValueError(f"{path}: expected lists of {', '.join(_CODES)}, got {source[:60]!r}")
        found.append((bytes(_CODES[word] for word in words), int(target)))
    return Sequences.of(found)


def _generate(path: Path) -> None:
    """Draw the data set and store it; of several processes, one does and the others wait."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.is_file():
                print(f"generating ListOps, 100,000 lists, in {path.parent} …", file=sys.stderr)
                store(path, make_listops())
    except OSError as error:
        raise OSError(
            f"found no ListOps under {path.parents[1]}, and cannot write one there ({error}); "
            "give a --data-dir that can be written to"
        ) from error


def store(path: Path, parts: dict[str, Sequences]) -> None:
    """Write the parts where :func:`read_listops` finds them."""
    arrays = {f"{name}_{p}": getattr(part, name) for p, part in parts.items() for name in _ARRAYS}
    write_whole(path, functools.partial(np.savez, **arrays))
