"""The corpus of source packages: checksums, parts by path, one corpus from one set of archives."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from gfsa_experiments.data.public_corpus import build, fetched, listed, part_of
from gfsa_experiments.tasks.pretrain.data import corpus_of


def write_archive(path: Path) -> Path:
    pages = {f"toy-1/doc/page{i}.rst": f"Page {i}. " + "words " * 60 for i in range(200)}
    pages |= {"toy-1/doc/short.rst": "see elsewhere", "toy-1/LICENSE": "Do as you like."}
    pages |= {"toy-1/doc/copy.rst": pages["toy-1/doc/page0.rst"], "toy-1/code.py": "x = 1\n" * 90}
    with tarfile.open(path, "w:gz") as packed:
        for name, text in pages.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            packed.addfile(member, io.BytesIO(text.encode()))
    return path


def test_an_archive_becomes_a_corpus_for_pretraining(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "toy-1.tar.gz")
    found = build([archive], tmp_path / "a")
    # neither the short page, nor the copy, nor code
    assert sum(found.values()) == 200
    assert found["train"] > 180
    assert min(found["valid"], found["test"]) > 0
    assert part_of("toy-1/doc/page0.rst") == part_of("toy-1/doc/page0.rst")
    build([archive], tmp_path / "b")
    for part in found:
        texts = [(tmp_path / x / f"{part}.txt").read_bytes() for x in "ab"]
        assert texts[0] == texts[1]
    read = corpus_of("a", tmp_path).documents()
    assert {part: len(documents) for part, documents in read.items()} == found
    assert (tmp_path / "a/.licences/toy-1-LICENSE").read_text() == "Do as you like."


def test_a_changed_archive_is_refused(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "toy-1.tar.gz")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    package = {"url": "https://nowhere.example/toy-1.tar.gz", "sha256": digest}
    assert fetched(package, tmp_path) == archive
    archive.write_bytes(b"other")
    with pytest.raises(ValueError, match=f"expected {digest}"):
        fetched(package, tmp_path)


def test_every_package_has_a_checksum_and_a_licence() -> None:
    assert len(listed()) > 15
    for package in listed():
        assert package["url"].endswith(".tar.gz")
        assert len(package["sha256"]) == 64
        assert package["licence"]
