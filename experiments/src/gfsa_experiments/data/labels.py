"""Labels of a caller's own data: classes or numbers, decided by what they look like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    values = [_number(text) for text in texts]
    numbers = [value for value in values if value is not None]
    numeric = len(numbers) == len(texts)
    whole = numeric and all(value.is_integer() for value in numbers)
    few = len(set(values)) <= _MOST_NUMBERED_CLASSES
    if wanted == "numbers" or (wanted == "auto" and numeric and not (whole and few)):
        if not numeric:
            wrong = next(text for text, value in zip(texts, values, strict=True) if value is None)
            raise ValueError(
                f"labels=numbers, but the column {column} has {wrong!r}; set labels=classes"
            )
        return _as_numbers(numbers, column, only_classes, advice)
    # 1 and 1.0 are one class if all are whole numbers
    names = [str(int(value)) for value in numbers] if whole else list(texts)
    classes = sorted(set(names), key=(lambda name: (int(name), name)) if whole else None)
    if wanted == "auto":
        words = [text for text, value in zip(texts, values, strict=True) if value is None]
        override = "" if only_classes else ", or labels=classes if each of them is a class"
        _refuse_many(classes, words, len(texts), column, advice + override)
    if len(classes) < 2:
        raise ValueError(
            f"every label in the column {column} is {classes[0]!r}: there is nothing to learn; "
            f"{advice}"
        )
    place = {name: float(number) for number, name in enumerate(classes)}
    why = f"classification, {len(classes)} classes: {_some(classes)}"
    if wanted == "auto" and whole and not only_classes:
        why += f" (at most {_MOST_NUMBERED_CLASSES} different whole numbers; labels=numbers"
        why += " would make them a quantity)"
    return Labels("classes", tuple(classes), [place[name] for name in names], why)


def _as_numbers(numbers: list[float], column: str, only_classes: bool, advice: str) -> Labels:
    """Labels that are numbers, unless the recipe predicts classes alone."""
    ends = f"numbers from {min(numbers):g} to {max(numbers):g}"
    if only_classes:
        raise ValueError(
            f"this recipe predicts classes, and the column {column} has {ends}; {advice}, or "
            "use the recipe text, which predicts numbers too"
        )
    why = f"regression, {ends} (labels=classes would make them classes)"
    return Labels("numbers", (), numbers, why)


def _refuse_many(
    classes: Sequence[str], words: Sequence[str], rows: int, column: str, advice: str
) -> None:
    """Raise ValueError for so many classes that they are no labels.

    Args:
        classes: the different labels.
        words: those labels of ``rows`` that are no finite numbers.
    """
    if len(classes) <= max(2, rows / 2):
        return
    if 0 < len(words) <= rows / 10:
        raise ValueError(
            f"the column {column} has {rows - len(words)} finite numbers and "
            f"{len(words)} other labels, such as {_some(words)}: correct or delete these rows"
        )
    raise ValueError(
        f"the column {column} has {len(classes)} different values in {rows} rows, such "
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
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _some(values: Sequence[str]) -> str:
    return ", ".join(values[:_SHOWN]) + (", …" if len(values) > _SHOWN else "")
