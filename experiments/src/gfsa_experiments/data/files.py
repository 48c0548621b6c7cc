"""Files of known data sets: where they are, how large they should be, and arrays read from them."""

from __future__ import annotations

import csv
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from gfsa_experiments.data.own import OPENERS

_DAMAGED = (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error)
# with a larger share of bad rows the file is probably not the expected one
_TOLERATED = 0.01
_EXAMPLES = 3


@lru_cache(maxsize=4)
def table(package: str, name: str) -> list[dict[str, str]]:
    """The lines of a table that is a file of a package."""
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@dataclass(frozen=True)
class DataSource:
    """A known data set."""

    name: str
    files: str
    """Its files, relative to ``--data-dir``."""
    where: str
    """Where to get them."""
    folders: tuple[str, ...]
    """The folders below ``--data-dir`` that may have them."""
    sizes: tuple[int, ...]
    """The official numbers of examples to train, validate and test on, where they are checked."""

    def find(self, data_dir: Path, *names: str) -> Path:
        """The first of ``names`` that exists, compressed or not, in one of the folders."""
        for name in names:
            for folder in self.folders:
                for suffix in ("", *OPENERS):
                    path = data_dir / folder / (name + suffix)
                    if path.is_file():
                        return path
        raise self.missing(data_dir, f"{', '.join(names)} (or the same with .xz or .gz)")

    def missing(self, data_dir: Path, names: str) -> FileNotFoundError:
        """The error for missing files: where they were searched and where to get them."""
        inside = ", ".join(f"{folder}/" for folder in self.folders if folder)
        return FileNotFoundError(
            f"{self.name}: found none of {names} in {data_dir.absolute()}"
            f"{f' or its {inside}' if inside else ''}. The data set consists of "
            f"{self.files}; get it from {self.where}, and give its folder with --data-dir"
        )


def source_of(key: str) -> DataSource:
    """The data set called ``key`` in ``sources.csv``."""
    (line,) = [each for each in table("gfsa_experiments.data", "sources.csv") if each["key"] == key]
    sizes = tuple(int(size) for size in line["sizes"].split(";") if size)
    folders = tuple(line["folders"].split(";"))
    return DataSource(line["name"], line["files"], line["where"], folders, sizes)


def check_count(where: object, found: object, official: object, what: str = "usable rows") -> None:
    """Warn if a file has another size than the official one."""
    if found != official:
        counts = [f"{n:,}" if isinstance(n, int) else str(n) for n in (found, official)]
        warnings.warn(
            f"{where} has {counts[0]} {what}, the official file {counts[1]}: "
            "results are not those of the official data set",
            stacklevel=3,
        )


def read_npz(
    path: Path, names: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """The arrays called ``names`` of an npz file, which must have them; nothing is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file.files]
            arrays = {name: file[name] for name in (*names, *optional) if name in file.files}
            available = ", ".join(file.files)
    except _DAMAGED as error:
        raise ValueError(f"{path} is damaged or no npz file ({error}); get it again") from error
    if missing:
        raise ValueError(f"{path} has no array {', '.join(missing)}; it has {available}")
    return arrays


Bad = list[tuple[int | str, str]]
"""The numbers, or names, of entries of a file that cannot be used, and why."""


def report_bad(
    bad: Bad, good: int, path: Path | str, unit: str = "rows", place: str = "row"
) -> None:
    """Warn about bad entries beside ``good`` ones; raise if they are more than 1 %.

    ``unit`` and ``place`` are what entries and the number of one are called.
    """
    total = len(bad) + good
    if total == 0:
        raise ValueError(f"{path} has no {unit}; get it again")
    if not bad:
        return
    examples = [f"{place} {number}: {reason}" for number, reason in bad[:_EXAMPLES]]
    examples += ["…"] * (len(bad) > _EXAMPLES)
    message = f"{path}: {len(bad)} of {total} {unit} cannot be used; {'; '.join(examples)}"
    if len(bad) > _TOLERATED * total:
        raise ValueError(
            f"{message}. More than 1 % of them are bad: get the file again, or check that it is "
            "the right one"
        )
    warnings.warn(f"{message}. They are left out", stacklevel=3)
