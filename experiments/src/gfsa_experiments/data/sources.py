"""The data sets that the recipes read: their names, files and origins, from ``sources.csv``."""

from __future__ import annotations

import csv
from functools import lru_cache
from importlib.resources import files

from gfsa_experiments.engine.task import DataSource


def source_of(key: str) -> DataSource:
    """The data set called ``key`` in the table."""
    (line,) = [line for line in _table() if line["key"] == key]
    return _source(line)


@lru_cache(maxsize=4)
def table(package: str, name: str) -> list[dict[str, str]]:
    """The lines of a table that is a file of a package."""
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _table() -> list[dict[str, str]]:
    return table("gfsa_experiments.data", "sources.csv")


def _source(line: dict[str, str]) -> DataSource:
    return DataSource(
        name=line["name"],
        files=line["files"],
        where=line["where"],
        folders=tuple(line["folders"].split(";")),
        sizes=tuple(int(size) for size in line["sizes"].split(";") if size),
    )
