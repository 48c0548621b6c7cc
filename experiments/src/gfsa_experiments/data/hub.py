"""Data sets from the Hugging Face hub, for those who have the package ``datasets`` and no files."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

PARTS = {"train": "train", "valid": "validation", "test": "test"}
"""What the hub calls the parts of a data set."""


def fetch(
    repository: str, name: str | None, parts: Sequence[str], missing: FileNotFoundError
) -> list[tuple[str, Any]]:
    """Some parts of a data set, each with its name, from the hub or from what it left on the disk.

    Args:
        repository: as the hub calls it.
        name: which of its data sets, if it has several.
        parts: as the hub calls them.
        missing: what was not found among files; raised again if the hub does not help.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise FileNotFoundError(
            f"{missing}; or pip install datasets, which fetches {repository} from the hub"
        ) from None
    which = (repository,) if name is None else (repository, name)
    try:
        found = [datasets.load_dataset(*which, split=part) for part in parts]
    except Exception as error:
        raise FileNotFoundError(
            f"{missing}. {repository} could not be had from the hub either: "
            f"{type(error).__name__}: {error}"
        ) from error
    warnings.warn(f"{missing}. It is taken from {repository} on the hub instead", stacklevel=3)
    return [(" ".join((*which, part)), one) for part, one in zip(parts, found, strict=True)]


def columns_of(where: str, part: Any, *names: str) -> list[Any]:
    """The columns called ``names`` of one part, which must have them."""
    if not set(names) <= set(part.column_names):
        raise ValueError(
            f"{where} should have the columns {', '.join(names)}, "
            f"it has {', '.join(part.column_names)}"
        )
    return [part[name] for name in names]
