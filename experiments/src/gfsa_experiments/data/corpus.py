"""Documents to model language on: from files of text, JSON lines, tables, or from the hub."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from gfsa_experiments.data import own
from gfsa_experiments.data.tables import ENDINGS as TABLES
from gfsa_experiments.data.tables import column_of, load_parts, open_table

SHARE = 0.05
"""The share of the text that ``valid`` gets, and ``test``."""
# how far a border may move towards the start to spare a document, a line or a word: a part keeps at
# least half of its share
_REACH = SHARE / 2
# of a line, of a word
_ENDS = (re.compile(r"\n"), re.compile(r"\s"))


def split_documents(documents: Sequence[str], root: str) -> dict[str, list[str]]:
    """The last 5 % of the text to test on, the 5 % before to validate on, the rest to train on.

    Where a document ends shortly before a border between two parts, the parts meet there. Otherwise
    the document that lies across the border is cut: at the end of a line if one is near, of a word,
    or between two characters. No other document is.
    """
    text, ends = "".join(documents), [0, *itertools.accumulate(map(len, documents))]
    size = len(text)
    borders = [_border(text, ends, int(share * size)) for share in (1 - 2 * SHARE, 1 - SHARE)]
    parts: dict[str, list[str]] = {}
    for name, first, last in zip(own.PARTS, [0, *borders], [*borders, size], strict=True):
        cuts = [first, *(end for end in ends if first < end < last), last]
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
        # blanks that a cut leaves alone are no document
        parts[name] = [piece for piece in pieces if piece.strip()]
    if not all(parts.values()):
        raise ValueError(
            f"{root} is too little text to be split into {', '.join(own.PARTS)}: it has {size:,} "
            f"characters in {len(documents):,} documents; give more, or a file for each part"
        )
    return parts


def _border(text: str, ends: Sequence[int], at: int) -> int:
    """Where to cut the text at about ``at``; ``ends`` are those of its documents."""
    # of the document that lies across
    start = ends[bisect.bisect(ends, at) - 1]
    earliest = at - int(_REACH * len(text))
    if 0 < start >= earliest:
        return start
    begin = max(start, earliest)
    found = [[match.end() for match in kind.finditer(text[begin:at])] for kind in _ENDS]
    return next((begin + places[-1] for places in found if places), at)


# in a folder; a csv beside the text is no text
_IN_FOLDERS = (".txt", ".md", ".text", ".jsonl", ".ndjson", ".parquet")


@dataclass(frozen=True)
class Corpus:
    """Documents in parts; where the data names no parts, they are split off ``train``."""

    name: str
    root: str
    """Where it is, for messages."""
    column: str
    """The key of the text in JSON lines, its column in tables."""
    sources: dict[str, Any]
    """The files of each part that the data names, or its table of the hub."""
    unread: tuple[str, ...] = ()
    """Other files of the folder, by their path in it."""

    @property
    def split_by(self) -> str:
        """How the parts were made, as a sentence."""
        percent = f"{100 * SHARE:g} %"
        said = "the parts that it names"
        if len(self.sources) == 2:
            start = "" if "test" in self.sources else "its valid is reported as test; "
            said = f"{start}the last {percent} of its documents to train on are valid"
        elif len(self.sources) == 1:
            said = f"about the last {percent} of the text is test, the {percent} before it valid"
        more = f" and {len(self.unread) - 3} more" if len(self.unread) > 3 else ""
        return said + (f"; not read: {', '.join(self.unread[:3])}{more}" if self.unread else "")

    def documents(self) -> dict[str, list[str]]:
        """The documents of each part."""
        found = {part: list(self._read(part)) for part in self.sources}
        if len(self.sources) == 1:
            found = split_documents(found["train"], self.root)
        elif len(found) == 2:
            # a data set of the hub
            train = found.pop("train")
            held_out = max(1, round(SHARE * len(train)))
            (test,) = found.values()
            found = {"train": train[:-held_out], "valid": train[-held_out:], "test": test}
        for name, documents in found.items():
            if not any(documents):
                raise ValueError(f"the {name} part of {self.root} has no text in it")
        return {name: found[name] for name in own.PARTS}

    def _read(self, part: str) -> Iterator[str]:
        """The documents of one part; in a file of text a NUL separates them."""
        source = self.sources[part]
        if not isinstance(source, tuple):
            yield from self._texts(f"{self.root} {part}", source)
            return
        for path in source:
            if own.ending_of(path) in TABLES:
                yield from self._texts(str(path), open_table(path))
            else:
                yield from filter(str.strip, own.text_of(path).split("\0"))

    def _texts(self, where: str, table: Any) -> Iterator[str]:
        for number, text in enumerate(column_of(where, table, self.column, "text"), start=1):
            # NaN stands for a missing cell
            if isinstance(text, str) and text.strip():
                yield text
            elif not (text is None or text != text or isinstance(text, str)):
                raise ValueError(
                    f"{where}, row {number}: expected a text in {self.column}, got "
                    f"{type(text).__name__}; set text= to the column of the text"
                )

    def identity(self) -> Iterator[str]:
        """Lines that stay the same as long as the documents do; cheap to find for files."""
        for part, source in self.sources.items():
            if isinstance(source, tuple):
                if self.column != "text" and part == next(iter(self.sources)):
                    yield f"column {self.column}\n"
                for path in source:
                    stat = path.stat()
                    yield f"{part} {path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n"
            else:
                texts = "\0".join(map(str, source.get(self.column, ())))
                digest = sha256(texts.encode("utf-8", "surrogatepass")).hexdigest()
                yield f"{self.root} {self.column} {part} {digest}\n"


def corpus_of(data: str, data_dir: Path, column: str = "text") -> Corpus:
    """The corpus that ``data`` names: a file or folder, or ``hub:ID``."""
    if data.startswith(own.HUB):
        sources, unused = load_parts(data)
        if "train" not in sources:
            raise ValueError(
                f"{data} has the parts {', '.join((*sources, *unused))}, but none to train on; "
                "export what you need to a file"
            )
        return Corpus(own.name_of(data), data, column, sources)
    path = own.find(data, data_dir, "a file or folder of text, or hub:ID")
    name = path.resolve().name.partition(".")[0]
    if path.is_file():
        # a file that is named is read, whatever its ending
        return Corpus(name, str(path), column, {"train": (path,)})
    files = own.files_in(path)
    texts = [p for p in files if own.ending_of(p) in _IN_FOLDERS]
    if not texts:
        raise ValueError(
            f"{path} has no text to read: expected files that end in {', '.join(_IN_FOLDERS)}, "
            f"packed ({', '.join(own.PACKED)}) or not, or data= to one file of any ending"
            f"{own.entries_of(path)}"
        )
    # a README beside the parts is about the text
    parts = {part: tuple(p for p in texts if own.part_of(p, path) == part) for part in own.PARTS}
    parts = {part: found for part, found in parts.items() if found}
    if parts and parts.keys() != set(own.PARTS):
        there = ", ".join(f"{p} ({found[0].relative_to(path)})" for p, found in parts.items())
        raise ValueError(
            f"{path} has files for {there}, but none for "
            f"{', '.join(part for part in own.PARTS if part not in parts)}: name files or folders "
            "after all three parts, or after none, to have them split"
        )
    parts = parts or {"train": tuple(texts)}
    read = {p for found in parts.values() for p in found}
    unread = tuple(str(p.relative_to(path)) for p in files if p not in read)
    return Corpus(name, str(path), column, parts, unread)
