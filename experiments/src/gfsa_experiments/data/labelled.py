"""Labelled texts from tables of a caller's own, in three parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gfsa_experiments.data.labels import Labels, Wanted, decide, refuse_unseen
from gfsa_experiments.data.own import digest_of, name_of
from gfsa_experiments.data.splits import three_parts
from gfsa_experiments.data.tables import read_rows
from gfsa_experiments.engine.task import OwnData


@dataclass(frozen=True)
class LabelledRows:
    """Texts, or pairs of them, with their labels, and the rows of each part."""

    texts: list[tuple[str, ...]]
    labels: Labels
    parts: dict[str, list[int]]
    own: OwnData


@lru_cache(maxsize=2)
def read_labelled(
    data: str,
    data_dir: Path,
    text: tuple[str, ...],
    label: str,
    wanted: Wanted = "auto",
    only_classes: bool = False,
) -> LabelledRows:
    """The examples of a table (:mod:`gfsa_experiments.data.tables`).

    Args:
        data: a file, a folder or ``hub:ID``.
        data_dir: where a relative path may begin.
        text: the column of the text, or the two columns of a pair.
        label: the column of the label.
        wanted: what the labels are, if they are not to decide it.
        only_classes: the recipe predicts classes alone.
    """
    columns = (*text, label)
    rows = read_rows(data, data_dir, columns, ("text",) * len(text) + ("label",))
    texts = [values[-1] for values in rows.values]
    labels = decide(texts, label, wanted, only_classes=only_classes)
    classes = labels.values if labels.kind == "classes" else None
    parts, split_by = three_parts(rows.parts, rows.where, classes)
    refuse_unseen(labels, parts, rows.where)
    if rows.unused:
        split_by += f"; not used: {', '.join(rows.unused)}"
    own = OwnData(
        name=name_of(data),
        source=rows.where,
        splits={part: len(chosen) for part, chosen in parts.items()},
        split_by=split_by,
        labels=f"{label}: {labels.why}",
        repeated=_repeated(rows.values, parts),
        digest=digest_of(
            piece
            for part, chosen in parts.items()
            for piece in (part, *(cell for row in chosen for cell in rows.values[row]))
        ),
    )
    return LabelledRows([values[:-1] for values in rows.values], labels, parts, own)


def _repeated(values: list[tuple[str, ...]], parts: dict[str, list[int]]) -> str:
    """How many examples of valid and test are trained on, word for word; empty if none is."""
    trained = {values[row][:-1] for row in parts["train"]}
    counts = {
        part: sum(values[row][:-1] in trained for row in rows)
        for part, rows in parts.items()
        if part != "train"
    }
    found = [f"{count} of {part}" for part, count in counts.items() if count]
    return f"{' and '.join(found)} are in train, too, word for word" if found else ""


def refuse_columns(text: tuple[str, ...], label: str) -> None:
    """Raise ValueError for columns that no table can answer."""
    if len(text) not in (1, 2):
        raise ValueError(
            f"text takes one column, or two for pairs of texts, got {', '.join(text) or 'none'}"
        )
    if label in text:
        raise ValueError(f"text and label name the same column, {label}")
