"""ListOps from the official tsv files, or made once and kept as tokens."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gfsa_experiments.data.files import BadRows, check_count
from gfsa_experiments.engine.task import DataSource
from gfsa_experiments.tasks.lra.listops import COUNTS, LONGEST, TOKENS, Sequences, make_listops

SOURCE = DataSource(
    "listops",
    "listops/basic_{train,val,test}.tsv; made (seed 0, as listops/listops_seed0.npz) if missing",
    "https://storage.googleapis.com/long-range-arena/lra_release.gz, listops-1000",
)
_FOLDERS = ("", "listops", "listops-1000", "lra_release/listops-1000")
_MADE = "listops_seed0.npz"
# the brackets of an operator and its list; parentheses only repeat the structure
_CODES = {token: code for code, token in enumerate(TOKENS) if code}
_OPENING = [code for code, token in enumerate(TOKENS) if token.startswith("[")]
_CLOSING = _CODES["]"]


@functools.lru_cache(maxsize=2)
def read_listops(data_dir: Path) -> dict[str, Sequences]:
    """``train``, ``val`` and ``test``; made if they are not there, and then kept."""
    for folder in (data_dir / name for name in _FOLDERS):
        paths = {part: folder / f"basic_{part}.tsv" for part in COUNTS}
        there = [path for path in paths.values() if path.is_file()]
        if there and len(there) < len(paths):
            absent = sorted(path.name for path in paths.values() if path not in there)
            raise FileNotFoundError(f"{folder} lacks {', '.join(absent)} beside {there[0].name}")
        if there:
            return {part: _read_tsv(path, COUNTS[part]) for part, path in paths.items()}
    for folder in (data_dir, data_dir / "listops"):
        if (folder / _MADE).is_file():
            return _open(folder / _MADE)
    return _make(data_dir / "listops" / _MADE)


def _read_tsv(path: Path, official: int) -> Sequences:
    """Columns Source and Target."""
    bad = BadRows(path)
    tokens, lengths, labels = [], [0], []
    with path.open(encoding="utf-8", errors="replace") as file:
        header = file.readline().split()
        if header != ["Source", "Target"]:
            raise ValueError(
                f"{path} should begin with the columns Source and Target, got {header}"
            )
        for number, line in enumerate(file, start=2):
            try:
                sequence, label = _parse(line)
            except ValueError as error:
                bad.add(number, str(error))
                continue
            tokens.append(sequence)
            lengths.append(len(sequence))
            labels.append(label)
    bad.report(len(labels))
    check_count(path, len(labels), official)
    joined = np.frombuffer(b"".join(tokens), np.uint8)
    return Sequences(joined, np.cumsum(lengths), np.array(labels, np.uint8))


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


def _make(path: Path) -> dict[str, Sequences]:
    """Draw the data set and keep it; of several processes, one does and the others wait."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if not path.is_file():
                print(f"making ListOps, 100,000 lists, in {path.parent} …", file=sys.stderr)
                _save(path, make_listops())
    except OSError as error:
        raise OSError(
            f"there is no ListOps under {path.parents[1]}, and none can be made there ({error}); "
            "give a --data-dir that can be written to"
        ) from error
    return _open(path)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time, where the system can do that; a lock ends with its process."""
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _save(path: Path, parts: dict[str, Sequences]) -> None:
    arrays = {
        f"{name}_{part}": getattr(sequences, name)
        for part, sequences in parts.items()
        for name in ("tokens", "offsets", "labels")
    }
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _open(path: Path) -> dict[str, Sequences]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            parts = {
                part: Sequences(
                    *(arrays[f"{name}_{part}"] for name in ("tokens", "offsets", "labels"))
                )
                for part in COUNTS
            }
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and it is made anew") from error
    for part, sequences in parts.items():
        ends = sequences.offsets[-1] == len(sequences.tokens)
        if len(sequences.offsets) != len(sequences) + 1 or not ends:
            raise ValueError(f"{path} is damaged ({part}); delete it and it is made anew")
        check_count(path, len(sequences), COUNTS[part])
    return parts
