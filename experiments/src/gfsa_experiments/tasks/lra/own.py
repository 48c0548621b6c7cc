"""Texts of a caller's own, byte by byte, as in the text task of the Long Range Arena."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path

from gfsa_experiments.data.tables import LabelledRows, read_labelled
from gfsa_experiments.engine.task import OwnData
from gfsa_experiments.tasks.lra.listops import Sequences

BYTES = 256
# labels are stored in bytes
_MOST_CLASSES = 256


@dataclasses.dataclass(frozen=True)
class OwnTexts:
    """The bytes of the texts of each part, the number of classes, and what was read."""

    parts: dict[str, Sequences]
    classes: int
    own: OwnData


@lru_cache(maxsize=2)
def read_texts(data: str, data_dir: Path, text: str, label: str, longest: int) -> OwnTexts:
    """Texts with classes from a table; those of more than ``longest`` bytes are cut."""
    rows = read_labelled(data, data_dir, (text,), label, only_classes=True)
    classes = len(rows.labels.classes)
    if classes > _MOST_CLASSES:
        raise ValueError(
            f"{rows.own.source}: this recipe predicts up to {_MOST_CLASSES} classes, and the "
            f"column {label} has {classes}; the recipe text predicts any number of them"
        )
    # 0 is the padding
    whole = [row[0].replace("\0", " ").encode() for row in rows.texts]
    cut = sum(len(one) > longest for one in whole)
    own = rows.own
    if cut:
        said = f"{own.split_by}; {cut} texts of more than {longest} bytes are cut"
        own = dataclasses.replace(own, split_by=said)
    parts = {part: _sequences(whole, rows, part, longest) for part in rows.parts}
    return OwnTexts(parts, classes, own)


def _sequences(whole: list[bytes], rows: LabelledRows, part: str, longest: int) -> Sequences:
    return Sequences.of(
        (whole[row][:longest], int(rows.labels.values[row])) for row in rows.parts[part]
    )
