"""Documents from files: text, or JSON lines with a ``text`` each, compressed or not."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gfsa_experiments.engine.task import DataSource

PARTS = ("train", "valid", "test")
SOURCE = DataSource(
    "text for pretraining",
    "a file or a folder of .txt, .md, .jsonl (a text each), plain, .xz or .gz; three parts by name "
    "(train, valid, test), or split by gfsa; or a folder that was prepared",
    "your own; techdocs is a corpus of documentation pages",
)
_TEXT = (".txt", ".md", ".text")
_LINES = (".jsonl", ".ndjson")
_PACKED = (".xz", ".gz")
_NAMES = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
# of each, where the files name no parts
_HELD_OUT = 0.05
# with fewer documents a held-out share of them would be none, or most of the text
_FEW_DOCUMENTS = 40


@dataclass(frozen=True)
class Corpus:
    """The files of each part; if only ``train`` has files, the other parts are split off it."""

    name: str
    root: Path
    files: dict[str, tuple[Path, ...]]

    @property
    def has_parts(self) -> bool:
        return "test" in self.files

    def documents(self) -> dict[str, list[str]]:
        """The documents of each part."""
        found = {name: list(_read_all(files)) for name, files in self.files.items()}
        if not self.has_parts:
            found = _split(found["train"], self.root)
        for name, documents in found.items():
            if not any(documents):
                raise ValueError(f"the {name} part of {self.root} has no text in it")
        return {name: found[name] for name in PARTS}


def find_corpus(data: str, data_dir: Path) -> Path:
    """The file or folder that ``data`` names: below ``data_dir``, or a path of its own."""
    for path in (data_dir / data, Path(data).expanduser()):
        if path.exists():
            return path
    raise FileNotFoundError(
        f"there is no {data} in {data_dir.absolute()}, nor a file or folder of that path; "
        "set data= to a file or folder of text, or give --data-dir"
    )


def read_corpus(path: Path) -> Corpus:
    """Which files at ``path`` belong to which part."""
    root = path if path.is_dir() else path.parent
    files = sorted(p for p in root.rglob("*") if p.is_file()) if path.is_dir() else [path]
    texts = [p for p in files if _kind(p) is not None and not _is_hidden(p, root)]
    # a README beside the parts is about the text
    parts = {name: tuple(p for p in texts if _part(p, root) == name) for name in PARTS}
    named = [name for name in PARTS if parts[name]]
    if not texts:
        known = ", ".join((*_TEXT, *_LINES))
        raise ValueError(
            f"{path} has no text to read: expected files that end in {known}, plain or with "
            f"{' or '.join(_PACKED)} behind it"
        )
    if path.is_file() or not named:
        return Corpus(_stem(path), path, {"train": tuple(texts)})
    if len(named) < len(PARTS):
        lacking = ", ".join(name for name in PARTS if name not in named)
        raise ValueError(
            f"{path} has files for {', '.join(named)}, but none for {lacking}: name files or "
            "folders after all three parts, or after none, to have them split"
        )
    return Corpus(_stem(path), path, parts)


def _kind(path: Path) -> str | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in _PACKED:
        suffixes = suffixes[:-1]
    last = suffixes[-1] if suffixes else ""
    if last in _TEXT:
        return "text"
    return "lines" if last in _LINES else None


def _is_hidden(path: Path, root: Path) -> bool:
    return any(word.startswith(".") for word in path.relative_to(root).parts)


def _part(path: Path, root: Path) -> str | None:
    """The part that a file's name, or that of its folder, says: ``techdocs.train.txt.xz``."""
    relative = path.relative_to(root)
    words = [
        *relative.parts[:-1],
        *path.name.lower().replace("-", ".").replace("_", ".").split("."),
    ]
    for name, spelt in _NAMES.items():
        if any(word.lower() in spelt for word in words):
            return name
    return None


def _stem(path: Path) -> str:
    return path.resolve().name.partition(".")[0]


def _read_all(files: tuple[Path, ...]) -> Iterator[str]:
    for path in files:
        yield from _read(path)


def _read(path: Path) -> Iterator[str]:
    """The documents of one file; in text a NUL separates them."""
    try:
        text = _unpacked(path).decode("utf-8-sig")
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged, or no UTF-8 text ({error})") from error
    if _kind(path) == "text":
        yield from (document for document in text.split("\0") if document.strip())
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _text_of(line, f"{path}, line {number}")


def _text_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected a JSON object with a text, got {error}") from error
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        got = f"the keys {', '.join(value)}" if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{where}: expected a JSON object whose key text is a string, got {got}")
    return text


def _unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    return gzip.decompress(data) if path.suffix == ".gz" else data


def _split(documents: list[str], root: Path) -> dict[str, list[str]]:
    """The last documents to test on, those before them to validate on: 5 % of the text each.

    A text of few documents is cut at ends of lines instead.
    """
    pieces = documents
    if len(documents) < _FEW_DOCUMENTS:
        pieces = [line for document in documents for line in document.splitlines(keepends=True)]
    ends = []
    size = 0
    for piece in pieces:
        size += len(piece)
        ends.append(size)
    begins = [1 - 2 * _HELD_OUT, 1 - _HELD_OUT]
    first, second = (sum(end <= share * size for end in ends) for share in begins)
    parts = {"train": pieces[:first], "valid": pieces[first:second], "test": pieces[second:]}
    if not all(parts.values()):
        raise ValueError(
            f"{root} is too little text to be split into {', '.join(PARTS)}: it has "
            f"{len(documents)} documents of {len(pieces)} pieces; give a file for each part"
        )
    if pieces is documents:
        return parts
    return {name: ["".join(part)] for name, part in parts.items()}
