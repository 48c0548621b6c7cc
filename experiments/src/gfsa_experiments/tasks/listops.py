"""ListOps of the Long Range Arena: nested lists of operators and digits, read or generated.

The value of ``[MAX 4 3 [MIN 2 3 ] 1 0 ]`` is 4. The official rules: an operator has 2 to 10
arguments, each an operator with probability 1/4 and a digit otherwise, at depth 10 (the root has
depth 1) always a digit; operators are MIN, MAX, MED (the median, rounded down) and SM (the sum
modulo 10); lists of more than 500 and fewer than 2,000 tokens are kept (so the root is always an
operator), without duplicates; 96,000 to train on, 2,000 to validate on, 2,000 to test on.

Drawing them takes some minutes, once: the lists are stored.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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

PAD = 0
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
_VALUES: tuple[Callable[[list[int]], float], ...] = (min, max, median, lambda v: sum(v) % 10)
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
    for sequence, label in _draw(random.Random(seed)):
        found.setdefault(sequence, label)
        if len(found) == sum(counts.values()):
            break
    lists = iter(found.items())
    return {name: Sequences.of(itertools.islice(lists, count)) for name, count in counts.items()}


def _draw(generator: random.Random) -> Iterator[tuple[bytes, int]]:
    """An endless stream of lists of valid length and their values."""
    while True:
        tokens: list[int] = []
        value = _grow(generator, 1, tokens)
        if SHORTEST <= len(tokens) <= LONGEST:
            yield bytes(tokens), value


def _grow(generator: random.Random, depth: int, tokens: list[int]) -> int:
    """Append a digit or an operator with its arguments; the value of it."""
    if depth > 1 and (depth == DEEPEST or generator.random() > OPERATOR_SHARE):
        digit = generator.randrange(10)
        tokens.append(_DIGIT + digit)
        return digit
    operator = generator.randrange(len(OPERATORS))
    tokens.append(_OPERATOR + operator)
    count = generator.randint(2, MOST_ARGUMENTS)
    values = [_grow(generator, depth + 1, tokens) for _ in range(count)]
    tokens.append(_CLOSE)
    return int(_VALUES[operator](values))


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
