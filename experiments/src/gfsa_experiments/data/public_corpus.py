"""A corpus for pretraining that anyone can rebuild: documentation in source packages of PyPI.

    python -m gfsa_experiments.data.public_corpus DATA/pydocs
    gfsa train pretrain --data-dir DATA --set data=pydocs

``public_corpus.csv`` names each package, its version by its file, the file's SHA-256 and its
licence. Every ``.rst``, ``.txt`` and ``.md`` file of a package is a document. The part that a
document belongs to follows from a hash of its path alone: 2 % valid, 2 % test. The same files give
the same corpus, byte for byte; the packages' licence files are kept beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import tarfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from gfsa_experiments.data.files import table
from gfsa_experiments.engine.whole_files import write_text, write_whole

_ENDINGS = (".rst", ".txt", ".md")
# a shorter file is a list of names or a redirect
_SHORTEST = 200
# beside the package, not in a folder of it
_LICENCE = re.compile(r"^[^/]+/(licen[sc]e|copying|notice)[^/]*$", re.IGNORECASE)


def listed() -> list[dict[str, str]]:
    """The packages of the corpus."""
    return table("gfsa_experiments.data", "public_corpus.csv")


def fetched(package: dict[str, str], folder: Path) -> Path:
    """The archive of a package in ``folder``, downloaded if need be; its hash is checked."""
    path = folder / package["url"].rpartition("/")[2]
    if not path.exists():
        with urllib.request.urlopen(package["url"], timeout=60) as response:
            data = response.read()
        write_whole(path, lambda file: file.write(data))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package["sha256"]:
        raise ValueError(
            f"{path} has the SHA-256 {found}, expected {package['sha256']}; delete it to fetch it "
            "again"
        )
    return path


def documents(archive: Path) -> Iterator[tuple[str, str]]:
    """Path and text of every document in an archive, in the order of their paths."""
    for name, data in sorted(_files_of(archive, lambda name: name.endswith(_ENDINGS))):
        try:
            text = data.decode("utf-8").replace("\0", "")
        except UnicodeDecodeError:
            continue
        if len(text) >= _SHORTEST:
            yield name, text


def _files_of(archive: Path, wanted: Callable[[str], object]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            file = packed.extractfile(member) if member.isfile() and wanted(member.name) else None
            if file is not None:
                yield member.name, file.read()


def part_of(name: str) -> str:
    """The part of a document, by its path."""
    place = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 50
    return {0: "valid", 1: "test"}.get(place, "train")


def build(archives: Iterable[Path], folder: Path) -> dict[str, int]:
    """Write ``train.txt``, ``valid.txt`` and ``test.txt``; the number of documents of each."""
    parts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    seen: set[str] = set()
    for archive in archives:
        for name, data in _files_of(archive, _LICENCE.search):
            # hidden: a licence is no document of the corpus
            place = folder / ".licences" / name.replace("/", "-")
            write_whole(place, lambda file, data=data: file.write(data))
        for name, text in documents(archive):
            # packages have copies of each other's pages
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest not in seen:
                seen.add(digest)
                parts[part_of(name)].append(text)
    for part, texts in parts.items():
        write_text(folder / f"{part}.txt", "\0".join(texts))
    return {part: len(texts) for part, texts in parts.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gfsa_experiments.data.public_corpus",
        description="Build a corpus of documentation from source packages of PyPI.",
    )
    parser.add_argument("folder", type=Path, help="where the corpus goes")
    parser.add_argument("--archives", type=Path, help="where downloads are kept; FOLDER/.archives")
    given = parser.parse_args(arguments)
    kept = given.archives or given.folder / ".archives"
    try:
        found = build([fetched(package, kept) for package in listed()], given.folder)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for part, count in found.items():
        path = given.folder / f"{part}.txt"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path}: {count:,} documents, {path.stat().st_size:,} bytes, sha256 {digest}")


if __name__ == "__main__":
    main()
