"""WikiText-2, WikiText-103 and the Penn Treebank from their official files.

Without files, and if the package ``datasets`` is installed, WikiText comes from the hub.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from gfsa_experiments.data import hub
from gfsa_experiments.data.files import check_count, find_file, read_lines
from gfsa_experiments.engine.task import DataSource

_REPOSITORY = "Salesforce/wikitext"
_WIKITEXT = f"https://huggingface.co/datasets/{_REPOSITORY}"
SOURCES = {
    "wikitext-2": DataSource(
        "WikiText-2",
        "wiki.{train,valid,test}.tokens (or .raw, or {train,valid,test}.txt), here or in "
        "wikitext-2/",
        _WIKITEXT,
    ),
    "wikitext-103": DataSource(
        "WikiText-103",
        "wiki.{train,valid,test}.tokens (or .raw), here or in wikitext-103/",
        _WIKITEXT,
    ),
    "ptb": DataSource(
        "Penn Treebank",
        "ptb.{train,valid,test}.txt, here, in ptb/, penn-treebank/ or simple-examples/data/",
        "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    ),
}
PARTS = ("train", "valid", "test")
_FOLDERS = {
    "wikitext-2": ("", "wikitext-2", "wikitext-2-raw"),
    "wikitext-103": ("", "wikitext-103", "wikitext-103-raw"),
    "ptb": ("", "ptb", "penn-treebank", "simple-examples/data"),
}
# words and ends of lines
_WORDS = {
    "wikitext-2": (2_088_628, 217_646, 245_569),
    "wikitext-103": (103_227_021, 217_646, 245_569),
    "ptb": (929_589, 73_760, 82_430),
}


@lru_cache(maxsize=3)
def read_corpus(data_dir: Path, name: str, part: str) -> tuple[str, ...]:
    """The lines of one part, each with the line feed that ends it."""
    names = [f"ptb.{part}.txt"]
    if name != "ptb":
        names = [f"wiki.{part}.tokens", f"wiki.{part}.raw", f"{part}.txt"]
    try:
        path = find_file(data_dir, names, SOURCES[name], _FOLDERS[name])
    except FileNotFoundError as missing:
        if name == "ptb":
            raise
        return _from_hub(data_dir, name, part, missing)
    lines = tuple(line + "\n" for line in read_lines(path))
    # the raw files contain the words that the others replace by <unk>: their counts differ
    if not path.name.startswith(f"wiki.{part}.raw"):
        check_count(path, count_words(lines), _WORDS[name][PARTS.index(part)], "words")
    return lines


def _from_hub(data_dir: Path, name: str, part: str, missing: FileNotFoundError) -> tuple[str, ...]:
    ((where, found),) = hub.fetch(data_dir, _REPOSITORY, f"{name}-v1", [hub.PARTS[part]], missing)
    (texts,) = hub.columns_of(where, found, "text")
    # the hub's empty lines lack their line feed
    lines = tuple(text.rstrip("\n") + "\n" for text in texts)
    check_count(where, count_words(lines), _WORDS[name][PARTS.index(part)], "words")
    return lines


def count_words(lines: tuple[str, ...]) -> int:
    """Words as these corpora count them: separated by blanks, plus one for each line end."""
    return sum(len(line.split()) + 1 for line in lines)
