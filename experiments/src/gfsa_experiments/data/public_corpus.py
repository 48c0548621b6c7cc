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
import csv
import hashlib
import tarfile
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath

from gfsa_experiments.engine.whole_files import write_whole

_ENDINGS = (".rst", ".txt", ".md")
# a shorter file is a list of names or a redirect
_SHORTEST = 200
_LICENCES = ("license", "licence", "copying", "notice")


def listed() -> list[dict[str, str]]:
    """The packages of the corpus."""
    text = files("gfsa_experiments.data").joinpath("public_corpus.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


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
    with tarfile.open(archive) as packed:
        members = [m for m in packed.getmembers() if m.isfile() and m.name.endswith(_ENDINGS)]
        for member in sorted(members, key=lambda member: member.name):
            file = packed.extractfile(member)
            assert file is not None
            try:
                text = file.read().decode("utf-8").replace("\0", "")
            except UnicodeDecodeError:
                continue
            if len(text) >= _SHORTEST:
                yield member.name, text


def part_of(name: str) -> str:
    """The part of a document, by its path."""
    place = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 50
    return {0: "valid", 1: "test"}.get(place, "train")


def build(archives: Iterable[Path], folder: Path) -> dict[str, int]:
    """Write ``train.txt``, ``valid.txt`` and ``test.txt``; the number of documents of each."""
    parts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    seen: set[str] = set()
    for archive in archives:
        _keep_licences(archive, folder / "licences")
        for name, text in documents(archive):
            # packages have copies of each other's pages
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest not in seen:
                seen.add(digest)
                parts[part_of(name)].append(text)
    for part, texts in parts.items():
        joined = "\0".join(texts).encode()
        write_whole(folder / f"{part}.txt", lambda file, joined=joined: file.write(joined))
    return {part: len(texts) for part, texts in parts.items()}


def _keep_licences(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            path = PurePosixPath(member.name)
            top = len(path.parts) == 2 and path.name.lower().startswith(_LICENCES)
            file = packed.extractfile(member) if member.isfile() and top else None
            if file is not None:
                text = file.read()
                # hidden: a licence is no document of the corpus
                place = folder.with_name(f".{folder.name}") / f"{path.parts[0]}-{path.name}"
                write_whole(place, lambda out, text=text: out.write(text))


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
