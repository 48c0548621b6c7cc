"""Sequences of the Long Range Arena: ListOps from files or generated, or texts of one's own."""

from __future__ import annotations

import dataclasses
import functools
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
from filelock import FileLock

from gfsa_experiments.data.files import read_npz, usable_rows
from gfsa_experiments.data.sources import source_of
from gfsa_experiments.data.tables import LabelledRows, read_labelled
from gfsa_experiments.engine.task import OwnData
from gfsa_experiments.engine.whole_files import write_whole
from gfsa_experiments.tasks.lra.listops import COUNTS, LONGEST, TOKENS, Sequences, make_listops

_GENERATED = "listops_seed0.npz"
_ARRAYS = ("tokens", "offsets", "labels")
# only words and brackets count: parentheses repeat the structure
_CODES = {token: code for code, token in enumerate(TOKENS) if code}
_OPENING = [code for code, token in enumerate(TOKENS) if token.startswith("[")]
_CLOSING = _CODES["]"]


@functools.lru_cache(maxsize=2)
def read_listops(data_dir: Path) -> dict[str, Sequences]:
    """``train``, ``val`` and ``test``; generated and stored if they do not exist."""
    for folder in (data_dir / name for name in source_of("listops").folders):
        paths = {part: folder / f"basic_{part}.tsv" for part in COUNTS}
        present = [path for path in paths.values() if path.is_file()]
        if present and len(present) < len(paths):
            absent = sorted(path.name for path in paths.values() if path not in present)
            raise FileNotFoundError(f"{folder} lacks {', '.join(absent)} beside {present[0].name}")
        if present:
            return {part: _read_tsv(path, COUNTS[part]) for part, path in paths.items()}
    stored = [folder / _GENERATED for folder in (data_dir, data_dir / "listops")]
    path = next((path for path in stored if path.is_file()), stored[-1])
    if not path.is_file():
        _generate(path)
    return _open(path)


def _read_tsv(path: Path, official: int) -> Sequences:
    """Columns Source and Target."""
    with path.open(encoding="utf-8", errors="replace") as file:
        header = file.readline().split()
        if header != ["Source", "Target"]:
            raise ValueError(
                f"{path} should begin with the columns Source and Target, got {header}"
            )
        return Sequences.of(usable_rows(path, file, _parse, official, first=2))


def _parse(line: str) -> tuple[bytes, int]:
    source, tab, target = line.rstrip("\r\n").partition("\t")
    if not tab or target not in set("0123456789"):
        raise ValueError(f"a target of {target!r}, expected a digit")
    words = source.replace("(", " ").replace(")", " ").split()
    try:
        sequence = bytes([_CODES[word] for word in words])
    except KeyError as error:
        raise ValueError(f"an unknown word {error}") from None
    if not 0 < len(sequence) <= LONGEST:
        raise ValueError(f"{len(sequence)} tokens, expected 1 to {LONGEST}")
    if sum(map(sequence.count, _OPENING)) != sequence.count(_CLOSING):
        raise ValueError("brackets that do not match")
    return sequence, int(target)


def _generate(path: Path) -> None:
    """Draw the data set and store it; of several processes, one does and the others wait."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.is_file():
                print(f"generating ListOps, 100,000 lists, in {path.parent} …", file=sys.stderr)
                arrays = {
                    f"{name}_{part}": getattr(sequences, name)
                    for part, sequences in make_listops().items()
                    for name in _ARRAYS
                }
                write_whole(path, functools.partial(np.savez, **arrays))
    except OSError as error:
        raise OSError(
            f"found no ListOps under {path.parents[1]}, and cannot write one there ({error}); "
            "give a --data-dir that can be written to"
        ) from error


def _open(path: Path) -> dict[str, Sequences]:
    try:
        # the npz format has a checksum for each array
        arrays = read_npz(path, [f"{name}_{part}" for part in COUNTS for name in _ARRAYS])
    except ValueError as error:
        raise ValueError(f"{error}, or delete it to generate it again") from error
    return {part: Sequences(*(arrays[f"{name}_{part}"] for name in _ARRAYS)) for part in COUNTS}


BYTES = 256
# labels are stored in bytes
_MOST_CLASSES = 256


@dataclasses.dataclass(frozen=True)
class OwnTexts:
    """The bytes of the texts of each part, the number of classes, and what was read."""

    parts: dict[str, Sequences]
    classes: int
    own: OwnData


@lru_cache(maxsize=2)
def read_texts(data: str, data_dir: Path, text: str, label: str, longest: int) -> OwnTexts:
    """Texts with classes from a table; those of more than ``longest`` bytes are cut."""
    rows = read_labelled(data, data_dir, (text,), label, only_classes=True)
    classes = len(rows.labels.classes)
    if classes > _MOST_CLASSES:
        raise ValueError(
            f"{rows.own.source}: this recipe predicts up to {_MOST_CLASSES} classes, and the "
            f"column {label} has {classes}; the recipe text predicts any number of them"
        )
    # 0 is the padding
    whole = [row[0].replace("\0", " ").encode() for row in rows.texts]
    cut = sum(len(one) > longest for one in whole)
    own = rows.own
    if cut:
        said = f"{own.split_by}; {cut} texts of more than {longest} bytes are cut"
        own = dataclasses.replace(own, split_by=said)
    parts = {part: _sequences(whole, rows, part, longest) for part in rows.parts}
    return OwnTexts(parts, classes, own)


def _sequences(whole: list[bytes], rows: LabelledRows, part: str, longest: int) -> Sequences:
    return Sequences.of(
        (whole[row][:longest], int(rows.labels.values[row])) for row in rows.parts[part]
    )
