"""Labels of a caller's own data: classes or numbers, decided by what they look like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Kind = Literal["classes", "numbers"]
Wanted = Literal["auto", "classes", "numbers"]

# more different whole numbers than this are a quantity
_MOST_NUMBERED_CLASSES = 20
_SHOWN = 6


@dataclass(frozen=True)
class Labels:
    """The label of each example as a number: of its class, or itself."""

    kind: Kind
    classes: tuple[str, ...]
    """In order; empty for numbers."""
    values: list[float]
    why: str
    """A sentence for the caller."""


def decide(
    texts: Sequence[str],
    column: str,
    wanted: Wanted = "auto",
    *,
    only_classes: bool = False,
    advice: str = "set label= to another column",
) -> Labels:
    """What the labels are.

    Words are classes; so are whole numbers of which at most 20 different ones occur. Other numbers
    are numbers, which a model is trained to predict.

    Args:
        texts: the labels as text.
        column: where they come from, for messages.
        wanted: the caller's own decision, if there is one.
        only_classes: the recipe predicts classes alone, and has no setting ``labels``.
        advice: what to do if they are no labels.
    """
    read = _Column(texts, column, [_number(text) for text in texts])
    _refuse_not_finite(read)
    if wanted == "numbers" or (wanted == "auto" and read.is_quantity):
        return _as_numbers(read, only_classes, advice)
    override = "" if only_classes else ", or labels=classes if each of them is a class"
    if wanted == "auto":
        _refuse_many_classes(read, advice + override)
    labels = _as_classes(read, advice)
    if wanted == "auto" and read.is_whole and not only_classes:
        hint = f"at most {_MOST_NUMBERED_CLASSES} different whole numbers; labels=numbers would"
        return replace(labels, why=f"{labels.why} ({hint} make them a quantity)")
    return labels


@dataclass(frozen=True)
class _Column:
    """The labels as they were read."""

    texts: Sequence[str]
    name: str
    values: list[float | None]
    """As numbers, None for what is no finite number."""

    @cached_property
    def numbers(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @cached_property
    def words(self) -> list[str]:
        """What is no finite number."""
        pairs = zip(self.texts, self.values, strict=True)
        return [text for text, value in pairs if value is None]

    @cached_property
    def is_whole(self) -> bool:
        """Whether all are whole numbers."""
        return not self.words and all(value.is_integer() for value in self.numbers)

    @cached_property
    def is_quantity(self) -> bool:
        """Whether all are numbers, and not a few different whole ones."""
        few = len(set(self.values)) <= _MOST_NUMBERED_CLASSES
        return not self.words and not (self.is_whole and few)

    @cached_property
    def names(self) -> list[str]:
        """The class of each label; 1 and 1.0 are one class if all are whole numbers."""
        return [str(int(value)) for value in self.numbers] if self.is_whole else list(self.texts)

    @cached_property
    def classes(self) -> list[str]:
        """The different classes, in order."""
        order = (lambda name: (int(name), name)) if self.is_whole else None
        return sorted(set(self.names), key=order)


def _refuse_not_finite(column: _Column) -> None:
    """Raise ValueError for NaN or infinity among numbers: missing, and no class of its own."""
    if column.numbers and column.words and all(_is_number(word) for word in column.words):
        raise ValueError(
            f"the column {column.name} has {len(column.numbers)} finite numbers and "
            f"{len(column.words)} other labels, such as {_some(sorted(set(column.words)))}: "
            "correct or delete these rows"
        )


def _as_numbers(column: _Column, only_classes: bool, advice: str) -> Labels:
    """Labels to predict as numbers; raises ValueError if they are none, or the recipe cannot."""
    if column.words:
        raise ValueError(
            f"labels=numbers, but the column {column.name} has {column.words[0]!r}; set "
            "labels=classes"
        )
    ends = f"numbers from {min(column.numbers):g} to {max(column.numbers):g}"
    if only_classes:
        raise ValueError(
            f"this recipe predicts classes, and the column {column.name} has {ends}; {advice}, or "
            "use the recipe text, which predicts numbers too"
        )
    why = f"regression, {ends} (labels=classes would make them classes)"
    return Labels("numbers", (), column.numbers, why)


def _as_classes(column: _Column, advice: str) -> Labels:
    """Labels to predict as classes; raises ValueError if there is only one."""
    classes = column.classes
    if len(classes) < 2:
        raise ValueError(
            f"every label in the column {column.name} is {classes[0]!r}: there is nothing to "
            f"learn; {advice}"
        )
    place = {name: float(number) for number, name in enumerate(classes)}
    why = f"classification, {len(classes)} classes: {_some(classes)}"
    return Labels("classes", tuple(classes), [place[name] for name in column.names], why)


def _refuse_many_classes(column: _Column, advice: str) -> None:
    """Raise ValueError for so many classes that they are no labels."""
    classes, words, rows = column.classes, column.words, len(column.texts)
    if len(classes) <= max(2, rows / 2):
        return
    if 0 < len(words) <= rows / 10:
        raise ValueError(
            f"the column {column.name} has {rows - len(words)} finite numbers and "
            f"{len(words)} other labels, such as {_some(words)}: correct or delete these rows"
        )
    raise ValueError(
        f"the column {column.name} has {len(classes)} different values in {rows} rows, such "
        f"as {_some(classes)}: it does not look like labels; {advice}"
    )


def refuse_unseen(labels: Labels, parts: dict[str, list[int]], where: str) -> None:
    """Raise ValueError if a part has a class that is not trained on."""
    if labels.kind == "numbers":
        return
    trained = {labels.values[row] for row in parts["train"]}
    for part, rows in parts.items():
        unseen = sorted({labels.values[row] for row in rows} - trained)
        if unseen:
            raise ValueError(
                f"{where}: {part} has labels that train lacks: "
                f"{_some([labels.classes[int(number)] for number in unseen])}"
            )


def _number(text: str) -> float | None:
    """The finite number that a text is, if it is one."""
    return float(text) if _is_number(text) and math.isfinite(float(text)) else None


def _is_number(text: str) -> bool:
    """Whether a text is a number, NaN and infinity included."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _some(values: Sequence[str]) -> str:
    return ", ".join(values[:_SHOWN]) + (", …" if len(values) > _SHOWN else "")
