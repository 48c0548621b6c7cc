"""ListOps of the Long Range Arena: generates nested lists of operators and digits.

The value of ``[MAX 4 3 [MIN 2 3 ] 1 0 ]`` is 4. The official rules: an operator has 2 to 10
arguments, each an operator with probability 1/4 and a digit otherwise, at depth 10 (the root has
depth 1) always a digit; operators are MIN, MAX, MED (the median, rounded down) and SM (the sum
modulo 10); lists of more than 500 and fewer than 2,000 tokens are kept (so the root is always an
operator), without duplicates; 96,000 to train on, 2,000 to validate on, 2,000 to test on.

Trees are drawn level by level in numpy, some thousands at once. To write the official tsv files:
``python -m gfsa_experiments.tasks.lra.listops FOLDER``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

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


def to_text(tokens: np.ndarray) -> str:
    """A sequence as in the official files, with parentheses around every step of a list.

    ``[MAX 4 3 ]`` is ``( ( ( [MAX 4 ) 3 ) ] )``.
    """
    pieces: list[str] = []
    opened: list[tuple[int, int]] = []
    for token in tokens.tolist():
        if _OPERATOR <= token < _CLOSE:
            opened.append((len(pieces), 0))
            pieces.append(TOKENS[token])
            continue
        if token == _CLOSE:
            at, count = opened.pop()
            pieces[at] = "( " * (count + 1) + pieces[at]
        pieces.append(f"{TOKENS[token]} )")
        if opened:
            at, count = opened[-1]
            opened[-1] = at, count + 1
            if token == _CLOSE:
                pieces.append(")")
    return " ".join(pieces)


def write_listops(folder: Path, seed: int = 0, counts: dict[str, int] | None = None) -> None:
    """Write ``basic_train.tsv``, ``basic_val.tsv`` and ``basic_test.tsv``."""
    for part, sequences in make_listops(seed, counts).items():
        write_whole(folder / f"basic_{part}.tsv", functools.partial(_write_tsv, sequences))


def _write_tsv(sequences: Sequences, file: BinaryIO) -> None:
    file.write(b"Source\tTarget\r\n")
    for index, label in enumerate(sequences.labels):
        file.write(f"{to_text(sequences[index])}\t{label}\r\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write ListOps in the official format.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_listops(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
