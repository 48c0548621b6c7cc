"""Documents to model language on: from files of text, JSON lines, tables, or from the hub."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from gfsa_experiments.data.held_out import SHARE, split_documents
from gfsa_experiments.data.hub import load_parts
from gfsa_experiments.data.own import (
    HUB,
    PACKED,
    ending_of,
    entries_of,
    find_own,
    first_lines,
    is_hidden,
    name_of,
    text_of,
)
from gfsa_experiments.data.splits import PARTS, part_of
from gfsa_experiments.data.table_files import ENDINGS as TABLES
from gfsa_experiments.data.tables import texts_of, texts_of_hub

_TEXT = (".txt", ".md", ".text")
_LINES = (".jsonl", ".ndjson")
# in a folder; a csv beside the text is no text
_IN_FOLDERS = (*_TEXT, *_LINES, ".parquet")
_SHOWN_UNREAD = 3
_SHOWN_VALUE = 40


@dataclass(frozen=True)
class Corpus(ABC):
    """Documents in parts; where the data names no parts, they are split off ``train``.

    Args:
        name: of the corpus.
        root: where it is, for messages.
        column: the key of the text in JSON lines, its column in tables.
    """

    name: str
    root: str
    column: str

    @property
    @abstractmethod
    def has_parts(self) -> bool:
        """Whether the data names its parts."""

    @abstractmethod
    def read(self) -> dict[str, list[str]]:
        """The documents of each part that the data names."""

    @abstractmethod
    def identity(self) -> Iterator[str]:
        """Lines that stay the same as long as the documents do; cheap to find."""

    @property
    def split_by(self) -> str:
        """How the parts were made, as a sentence."""
        if self.has_parts:
            return "the parts that it names"
        percent = round(100 * SHARE)
        return f"about the last {percent} % of the text is test, the {percent} % before it valid"

    def documents(self) -> dict[str, list[str]]:
        """The documents of each part."""
        found = self.read()
        if not any(map(any, found.values())):
            raise ValueError(f"{self.root} has no text in it: expected a document or more, got 0")
        if not self.has_parts:
            found = split_documents(found["train"], self.root)
        for name, documents in found.items():
            if not any(documents):
                raise ValueError(f"the {name} part of {self.root} has no text in it")
        return {name: found[name] for name in PARTS}


@dataclass(frozen=True)
class FileCorpus(Corpus):
    """The files of each part.

    Args:
        files: those that are read.
        unread: other files of the folder, by their path in it.
    """

    files: dict[str, tuple[Path, ...]]
    unread: tuple[str, ...] = ()

    @property
    def has_parts(self) -> bool:
        return "test" in self.files

    @property
    def split_by(self) -> str:
        if not self.unread:
            return super().split_by
        more = len(self.unread) - _SHOWN_UNREAD
        shown = ", ".join(self.unread[:_SHOWN_UNREAD]) + (f" and {more} more" if more > 0 else "")
        return f"{super().split_by}; not read: {shown}"

    def read(self) -> dict[str, list[str]]:
        return {
            name: [document for path in files for document in _read(path, self.column)]
            for name, files in self.files.items()
        }

    def identity(self) -> Iterator[str]:
        if self.column != "text":
            yield f"column {self.column}\n"
        for part, files in self.files.items():
            for path in files:
                stat = path.stat()
                yield f"{part} {path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n"


@dataclass(frozen=True)
class HubCorpus(Corpus):
    """Tables of the hub, one for each part."""

    tables: dict[str, Any]

    @property
    def has_parts(self) -> bool:
        return len(self.tables) > 1

    @property
    def split_by(self) -> str:
        if len(self.tables) != 2:
            return super().split_by
        (other,) = set(self.tables) - {"train"}
        held_out = f"the last {round(100 * SHARE)} % of its documents to train on are valid"
        return held_out if other == "test" else f"its valid is reported as test; {held_out}"

    def read(self) -> dict[str, list[str]]:
        found = {part: [text for text in self._texts(part) if text.strip()] for part in self.tables}
        if len(found) != 2:
            return found
        (other,) = set(found) - {"train"}
        train = found["train"]
        held_out = max(1, round(SHARE * len(train)))
        return {"train": train[:-held_out], "valid": train[-held_out:], "test": found[other]}

    def _texts(self, part: str) -> list[str]:
        return texts_of_hub(f"{self.root} {part}", self.tables[part], self.column)

    def identity(self) -> Iterator[str]:
        yield f"{self.root} {self.column}\n"
        for part, table in self.tables.items():
            known = getattr(table, "_fingerprint", None)
            if known is None:
                digest = sha256()
                for text in table[self.column] if self.column in table.column_names else ():
                    digest.update(str(text).encode())
                known = digest.hexdigest()
            yield f"{part} {known}\n"


def find_corpus(data: str, data_dir: Path) -> Path:
    """The file or folder that ``data`` names: below ``data_dir``, or a path of its own."""
    return find_own(data, data_dir, "a file or folder of text, or hub:ID")


def corpus_of(data: str, data_dir: Path, column: str = "text") -> Corpus:
    """The corpus that ``data`` names: a file or folder, or ``hub:ID``."""
    if data.startswith(HUB):
        return _hub_corpus(data, column)
    return read_corpus(find_corpus(data, data_dir), column)


def read_corpus(path: Path, column: str = "text") -> FileCorpus:
    """Which files at ``path`` belong to which part."""
    if path.is_file():
        # a file that is named is read, whatever its ending
        return FileCorpus(_stem(path), str(path), column, {"train": (path,)})
    files = sorted(p for p in path.rglob("*") if p.is_file())
    texts = [p for p in files if ending_of(p) in _IN_FOLDERS and not is_hidden(p, path)]
    # a README beside the parts is about the text
    parts = {name: tuple(p for p in texts if part_of(p, path) == name) for name in PARTS}
    named = [name for name in PARTS if parts[name]]
    if not texts:
        raise ValueError(
            f"{path} has no text to read: expected files that end in {', '.join(_IN_FOLDERS)}, "
            f"plain or with {' or '.join(PACKED)} behind it, or data= to one file, which is read "
            f"whatever its ending{entries_of(path)}"
        )
    if not named:
        parts = {"train": tuple(texts)}
    elif len(named) < len(PARTS):
        lacking = ", ".join(name for name in PARTS if name not in named)
        there = ", ".join(f"{name} ({parts[name][0].relative_to(path)})" for name in named)
        raise ValueError(
            f"{path} has files for {there}, but none for {lacking}: name files or folders after "
            "all three parts, or after none, to have them split"
        )
    read = {p for found in parts.values() for p in found}
    unread = [p for p in files if p not in read and not is_hidden(p, path)]
    names = tuple(str(p.relative_to(path)) for p in unread)
    return FileCorpus(_stem(path), str(path), column, parts, names)


def _hub_corpus(data: str, column: str) -> HubCorpus:
    parts, unused = load_parts(data)
    if "train" not in parts:
        raise ValueError(
            f"{data} has the parts {', '.join((*parts, *unused))}, but none to train on; export "
            "what you need to a file"
        )
    return HubCorpus(name_of(data), data, column, parts)


def _stem(path: Path) -> str:
    return path.resolve().name.partition(".")[0]


def _read(path: Path, column: str) -> Iterator[str]:
    """The documents of one file; in text a NUL separates them."""
    ending = ending_of(path)
    if ending in _LINES:
        yield from _read_lines(path, column)
    elif ending in TABLES:
        yield from (text for text in texts_of(path, column) if text.strip())
    else:
        yield from (document for document in text_of(path).split("\0") if document.strip())


def _read_lines(path: Path, column: str) -> Iterator[str]:
    text = text_of(path)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            reason, found = _text_in(line, column)
            if reason is not None:
                raise ValueError(f"{path}, line {number}: {reason}{first_lines(text.splitlines())}")
            if found.strip():
                yield found


def _text_in(line: str, column: str) -> tuple[str | None, str]:
    """Why a line has no text, or None, and the text."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return f"expected a JSON object with a text, got {error}", ""
    text = value.get(column) if isinstance(value, dict) else None
    if isinstance(text, str):
        half = re.search("[\ud800-\udfff]", text)
        if half is None:
            return None, text
        return (
            f"expected text, got {half[0]!r}, half of a pair, at character {half.start():,} of the "
            f"key {column}; it is no character of its own: leave it out"
        ), ""
    if isinstance(value, dict) and column in value:
        got = f"{json.dumps(text)[:_SHOWN_VALUE]} there; leave the line out, or set"
    else:
        got = f"the keys {', '.join(value)}" if isinstance(value, dict) else type(value).__name__
        got += "; set"
    return (
        f"expected a JSON object whose key {column} is a string, got {got} text= to the key of the "
        "text"
    ), ""
