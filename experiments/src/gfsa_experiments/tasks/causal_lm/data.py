"""WikiText-2, WikiText-103 and the Penn Treebank from their official files; text of one's own.

Without files, and if the package ``datasets`` is installed, WikiText comes from the hub.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from gfsa_experiments.data import hub
from gfsa_experiments.data.corpus import corpus_of
from gfsa_experiments.data.files import check_count, find_file, read_lines
from gfsa_experiments.data.sources import source_of
from gfsa_experiments.data.splits import PARTS

_REPOSITORY = "Salesforce/wikitext"


@lru_cache(maxsize=3)
def read_corpus(data_dir: Path, name: str, part: str) -> tuple[str, ...]:
    """The lines of one part, each with the line feed that ends it."""
    names = [f"ptb.{part}.txt"]
    if name != "ptb":
        names = [f"wiki.{part}.tokens", f"wiki.{part}.raw", f"{part}.txt"]
    try:
        path = find_file(data_dir, names, source_of(name))
    except FileNotFoundError as missing:
        if name == "ptb":
            raise
        return _from_hub(data_dir, name, part, missing)
    lines = tuple(line + "\n" for line in read_lines(path))
    # the raw files contain the words that the others replace by <unk>: their counts differ
    if not path.name.startswith(f"wiki.{part}.raw"):
        _check_words(path, lines, name, part)
    return lines


def own_lines(data_dir: Path, data: str, column: str) -> tuple[dict[str, tuple[str, ...]], str]:
    """The lines of each part of a corpus of the caller's own, and how the parts were made."""
    corpus = corpus_of(data, data_dir, column)
    lines = {
        part: tuple(line + "\n" for text in documents for line in _lines(text))
        for part, documents in corpus.documents().items()
    }
    return lines, corpus.split_by


def _lines(text: str) -> list[str]:
    """Only line feeds separate lines."""
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def _from_hub(data_dir: Path, name: str, part: str, missing: FileNotFoundError) -> tuple[str, ...]:
    ((where, found),) = hub.fetch(data_dir, _REPOSITORY, f"{name}-v1", [hub.PARTS[part]], missing)
    (texts,) = hub.columns_of(where, found, "text")
    # the hub's empty lines lack their line feed
    lines = tuple(text.rstrip("\n") + "\n" for text in texts)
    _check_words(where, lines, name, part)
    return lines


def _check_words(where: Path | str, lines: tuple[str, ...], name: str, part: str) -> None:
    check_count(where, count_words(lines), source_of(name).sizes[PARTS.index(part)], "words")


def count_words(lines: tuple[str, ...]) -> int:
    """Words as these corpora count them: separated by blanks, plus one for each line end."""
    return sum(len(line.split()) + 1 for line in lines)
