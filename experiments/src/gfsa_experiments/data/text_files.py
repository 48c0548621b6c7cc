"""Finding, opening and checking text files: plain, .xz or .gz, and honest about bad rows."""

from __future__ import annotations

import gzip
import lzma
import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from gfsa_experiments.engine.task import DataSource

_OPENERS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".xz": lzma.decompress,
    ".gz": gzip.decompress,
}
# more bad rows than this, and the file is not what it is taken for
_TOLERATED = 0.01
_SHOWN = 3


def find_file(
    data_dir: Path, names: Iterable[str], source: DataSource, folders: Iterable[str] = ("",)
) -> Path:
    """The first of ``names`` that there is, compressed or not, in one of the folders."""
    names, folders = list(names), list(folders)
    for name in names:
        for folder in folders:
            for suffix in _OPENERS:
                path = data_dir / folder / (name + suffix)
                if path.is_file():
                    return path
    also = ", ".join(f"{folder}/" for folder in folders if folder)
    raise FileNotFoundError(
        f"{source.name}: there is none of {', '.join(names)} (or the same with .xz or .gz) in "
        f"{data_dir.absolute()}{f' or its {also}' if also else ''}. It consists of {source.files}; "
        f"get it from {source.where}, and give the folder with --data-dir"
    )


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, without their ends; only line feeds end a line."""
    suffix = path.suffix if path.suffix in _OPENERS else ""
    try:
        text = _OPENERS[suffix](path.read_bytes()).decode("utf-8")
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); get it again") from error
    if not text:
        raise ValueError(f"{path} is empty; get it again")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


class BadRows:
    """Rows of a file that could not be used, and why; at the end they are reported."""

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self.count = 0
        self.examples: list[str] = []

    def add(self, line: int, why: str) -> None:
        self.count += 1
        if len(self.examples) < _SHOWN:
            self.examples.append(f"line {line}: {why}")

    def report(self, good: int) -> None:
        """Warn of bad rows beside ``good`` ones; raise if they are more than 1 %."""
        total = self.count + good
        if total == 0:
            raise ValueError(f"{self.path} has no rows; get it again")
        if not self.count:
            return
        message = (
            f"{self.path}: {self.count} of {total} rows cannot be used; "
            + "; ".join(self.examples)
            + ("; …" if self.count > len(self.examples) else "")
        )
        if self.count > _TOLERATED * total:
            raise ValueError(
                f"{message}. More than {_TOLERATED:.0%} of bad rows: get the file again, or check "
                "that it is the one that it is taken for"
            )
        warnings.warn(f"{message}. They are left out", stacklevel=3)


def check_count(path: Path | str, found: int, official: int, what: str = "usable rows") -> None:
    """Warn if a file has another size than the official one."""
    if found != official:
        warnings.warn(
            f"{path} has {found:,} {what}, the official file {official:,}: "
            "results are not those of the official data set",
            stacklevel=3,
        )
