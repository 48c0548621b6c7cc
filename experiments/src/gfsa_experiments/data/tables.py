"""Tables (csv, tsv, JSON, parquet, a data set of the hub), and labelled texts read from them.

pandas reads files, the package ``datasets`` the hub. A file is one table; a folder, or a data set
of the hub, has a table for each part that it names.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from gfsa_experiments.data import own
from gfsa_experiments.data.files import Bad, report_bad
from gfsa_experiments.data.own import Labels, Wanted
from gfsa_experiments.engine.config import TrainConfig
from gfsa_experiments.engine.task import OwnData

ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
_HALF = re.compile("[\ud800-\udfff]")
# the folder of a command that was given none: it need not exist
_DEFAULT_FOLDER = Path("data")


def open_table(path: Path, **options: Any) -> Any:
    """The table in a file, a DataFrame whose cells are text where the file is text.

    ``options`` are those of pandas' ``read_csv``.
    """
    import pandas as pd

    ending = own.ending_of(path)
    try:
        if ending == ".parquet":
            return pd.read_parquet(path)
        if ending in (".jsonl", ".ndjson", ".json"):
            return pd.read_json(path, lines=ending != ".json", dtype=False)
        if ending == ".tsv":
            # a quote in a tsv is a part of its text, as in GLUE's files
            options = {"sep": "\t", "quoting": 3, "lineterminator": "\n"} | options
        elif ending == ".csv":
            head = str(pd.read_csv(path, sep="\x01", nrows=1, header=None, dtype=str).iloc[0, 0])
            options = {"sep": max((",", ";", "\t"), key=head.count)} | options
        else:
            raise ValueError(
                f"expected a file that ends in {', '.join(ENDINGS)}, the text ones plain or with "
                ".xz or .gz behind it"
            )
        # a line of more fields than columns is left out with a warning
        options |= {"on_bad_lines": "warn", "encoding": "utf-8-sig", "dtype": str}
        found = pd.read_csv(path, keep_default_na=False, **options)
        return found.rename(columns=lambda name: name.strip() if isinstance(name, str) else name)
    except (ValueError, OSError, EOFError, TypeError) as error:
        # the errors of pandas and pyarrow are kinds of these
        raise ValueError(
            f"{path} is damaged, or no table of the kind that its name says: {error}"
        ) from error


def from_hub(data: str, split: str | None = None) -> Any:
    """What ``datasets`` loads for ``hub:ID`` or ``hub:ID:CONFIGURATION``."""
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise FileNotFoundError(f"{data}: pip install datasets, which fetches it") from None
    which = filter(None, data.removeprefix(own.HUB).split(":"))
    try:
        return datasets.load_dataset(*which, **({} if split is None else {"split": split}))
    except Exception as error:
        # its errors are of many kinds
        raise FileNotFoundError(
            f"{data} could not be loaded from the hub ({type(error).__name__}: {error}); expected "
            "hub:ID or hub:ID:CONFIGURATION of a data set there"
        ) from error


def instead_of_files(
    missing: FileNotFoundError, data_dir: Path, data: str, splits: Sequence[str]
) -> list[tuple[str, Any]]:
    """Some splits of a known data set from the hub, as DataFrames, since its files are missing.

    The hub is not asked for a folder that was given but does not exist: that is a mistake, and an
    answer may take minutes.
    """
    if data_dir != _DEFAULT_FOLDER and not data_dir.exists():
        raise FileNotFoundError(
            f"{data_dir} does not exist. {missing}, or leave --data-dir out to fetch {data}"
        ) from None
    try:
        found = [(f"{data} {split}", from_hub(data, split).to_pandas()) for split in splits]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{missing}. {error}") from error
    warnings.warn(f"{missing}. Using {data} instead", stacklevel=3)
    return found


def load_parts(data: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The parts of a data set of the hub as DataFrames, and the names of those not used."""
    found = from_hub(data)
    parts = {own.part_named(str(name)): name for name in found if own.part_named(str(name))}
    unused = tuple(str(name) for name in found if own.part_named(str(name)) is None)
    if not parts and len(unused) == 1:
        parts, unused = {"train": unused[0]}, ()
    return {str(part): _frame(found[name]) for part, name in parts.items()}, unused


def _frame(part: Any) -> Any:
    """A part as a DataFrame; numbered classes by their names, hidden ones (−1) missing."""
    frame = part.to_pandas()
    for column, feature in part.features.items():
        if (names := getattr(feature, "names", None)) is not None:
            frame[column] = [None if n is None or n < 0 else names[int(n)] for n in frame[column]]
    return frame


Tables = dict[str, list[tuple[str, Any]]]
"""The tables of each part, and where they are; ``train`` alone if the data names no parts."""


def _tables_of(data: str, data_dir: Path, label: str) -> tuple[str, Tables, tuple[str, ...]]:
    """Where ``data`` is, its tables, and the parts that are not used."""
    if data.startswith(own.HUB):
        parts, unused = load_parts(data)
        for part in [*parts]:
            # as in test sets of a contest
            if part != "train" and label in parts[part] and parts[part][label].isna().all():
                unused += (f"{part}, whose {label} is hidden",)
                del parts[part]
        return data, {part: [(f"{data} {part}", table)] for part, table in parts.items()}, unused
    path = own.find(data, data_dir, f"a file or folder of tables ({', '.join(ENDINGS)})")
    if path.is_file():
        return str(path), {"train": [(str(path), open_table(path))]}, ()
    part_of = {f: own.part_of(f, path) for f in own.files_in(path) if own.ending_of(f) in ENDINGS}
    if not part_of:
        there = own.entries_of(path)
        raise ValueError(f"{path} has no table that ends in {', '.join(ENDINGS)}{there}")
    without = [file.name for file, part in part_of.items() if part is None]
    if 0 < len(without) < len(part_of):
        raise ValueError(
            f"{path} has files that are named after parts and others that are not, "
            f"{', '.join(without[:5])}: name all of them after train, valid or test, or none"
        )
    found: Tables = {}
    for file, named in part_of.items():
        found.setdefault(named or "train", []).append((str(file), open_table(file)))
    return str(path), found, ()


def column_of(where: object, table: Any, column: str, setting: str) -> list[Any]:
    """One column of a table, which must be there once."""
    there = list(table.columns)
    if there.count(column) != 1:
        raise ValueError(
            f"{where} has {there.count(column) or 'no'} column {column!r}; it has "
            f"{', '.join(map(str, there)) or 'none'}"
            + (f": set {setting}= to one of them" if setting else "")
        )
    cells: list[Any] = table[column].tolist()
    return cells


def usable_rows(
    where: object, table: Any, columns: Sequence[str], settings: Sequence[str], empty: str = ""
) -> list[tuple[str, ...]]:
    """The rows of one table that have a text in every wanted column; others are reported."""
    cells = [column_of(where, table, c, s) for c, s in zip(columns, settings, strict=True)]
    bad: Bad = []
    found = []
    for number, row in enumerate(zip(*cells, strict=True), start=1):
        for column, cell in zip(columns, row, strict=True):
            if isinstance(cell, bytes | list | dict):
                raise ValueError(
                    f"{where}, row {number}: expected a text or a number in the column {column}, "
                    f"got {type(cell).__name__}"
                )
        # NaN stands for a missing cell in many tables
        texts = tuple("" if cell is None or cell != cell else str(cell).strip() for cell in row)
        lacking = [c for c, text in zip(columns, texts, strict=True) if not text and c != empty]
        # JSON may have halves of surrogate pairs; no tokenizer takes them
        if lacking or any(map(_HALF.search, texts)):
            why = f"nothing in {', '.join(lacking)}" if lacking else "half a character"
            bad.append((number, why))
        else:
            found.append(texts)
    report_bad(bad, len(found), str(where))
    return found


@dataclass(frozen=True)
class LabelledRows:
    """Texts, or pairs of them, with their labels, and the rows of each part."""

    texts: list[tuple[str, ...]]
    labels: Labels
    parts: dict[str, list[int]]
    own: OwnData | None = None
    """What was read, if it is the caller's own."""


@lru_cache(maxsize=2)
def read_labelled(
    data: str,
    data_dir: Path,
    text: tuple[str, ...],
    label: str,
    wanted: Wanted = "auto",
    only_classes: bool = False,
) -> LabelledRows:
    """The examples of a table: a text, or a pair of them, and a label in each row.

    :func:`~gfsa_experiments.data.own.decide` says what ``wanted`` and ``only_classes`` mean.
    """
    where, tables, unused = _tables_of(data, data_dir, label)
    columns, settings = (*text, label), (*["text"] * len(text), "label")
    rows: list[tuple[str, ...]] = []
    named: dict[str, range] = {}
    for part, of_part in tables.items():
        begin = len(rows)
        for name, table in of_part:
            rows += usable_rows(name, table, columns, settings)
        named[part] = range(begin, len(rows))
    labels = own.decide([row[-1] for row in rows], label, wanted, only_classes=only_classes)
    parts, split_by = own.three_parts(named, where, labels.values if labels.classes else None)
    own.refuse_unseen(labels, parts, where)
    if unused:
        split_by += f"; not used: {', '.join(unused)}"
    texts = [row[:-1] for row in rows]
    trained = {texts[row] for row in parts["train"]}
    twice = {part: sum(texts[row] in trained for row in parts[part]) for part in ("valid", "test")}
    repeated = " and ".join(f"{count} of {part}" for part, count in twice.items() if count)
    cells = {part: [c for row in of for c in rows[row]] for part, of in parts.items()}
    facts = own.facts(
        data,
        where,
        parts,
        split_by,
        (piece for part, of in cells.items() for piece in (part, *of)),
        labels=f"{label}: {labels.why}",
        repeated=f"{repeated} are in train, too, word for word" if repeated else "",
    )
    return LabelledRows(texts, labels, parts, facts)


@dataclass(frozen=True, kw_only=True)
class OwnTable(TrainConfig):
    """Settings of recipes that read texts with labels from a table of the caller's own."""

    short_names = (("label", "label_column"),)
    used_if: ClassVar[tuple[tuple[str, str], ...]] = (("data", "text label_column"),)

    data: str = ""
    """A file or folder of tables (.csv, .tsv, .jsonl, .json, .parquet), or ``hub:ID``, in the place
    of a known data set."""
    text: tuple[str, ...] = ("text",)
    """Its column of texts; two columns for pairs of texts."""
    label_column: str = "label"
    """Its column of labels; ``label=`` for short."""

    def check(self) -> None:
        super().check()
        if len(self.text) not in (1, 2):
            raise ValueError(
                "text takes one column, or two for pairs of texts, got "
                f"{', '.join(self.text) or 'none'}"
            )
        if self.label_column in self.text:
            raise ValueError(f"text and label name the same column, {self.label_column}")
