"""Data sets from the Hugging Face hub, through the package ``datasets``."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = {"train": "train", "valid": "validation", "test": "test"}
"""The hub's names of the parts of a data set."""


# the folder of a command that was given none: it need not exist
_DEFAULT_FOLDER = Path("data")


def fetch(
    data_dir: Path,
    repository: str,
    name: str | None,
    parts: Sequence[str],
    missing: FileNotFoundError,
) -> list[tuple[str, Any]]:
    """Some parts of a data set, each with its name, from the hub or its cache on the disk.

    The hub is not asked for a folder that was given but does not exist: that is a mistake, and an
    answer may take minutes.

    Args:
        data_dir: where its files are missing.
        repository: the hub's name of it.
        name: one of its data sets, if it has several.
        parts: by the hub's names.
        missing: the error about missing files, which is raised if the hub fails too.
    """
    if data_dir != _DEFAULT_FOLDER and not data_dir.exists():
        raise FileNotFoundError(
            f"{data_dir} does not exist. {missing}, or leave --data-dir out to fetch {repository} "
            "from the hub"
        ) from None
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
            f"{missing}. {repository} could not be loaded from the hub either: "
            f"{type(error).__name__}: {error}"
        ) from error
    warnings.warn(f"{missing}. Using {repository} from the hub instead", stacklevel=3)
    return [(" ".join((*which, part)), table) for part, table in zip(parts, found, strict=True)]


def columns_of(where: str, part: Any, *names: str) -> list[Any]:
    """The columns called ``names`` of one part, which must exist."""
    if not set(names) <= set(part.column_names):
        raise ValueError(
            f"{where} should have the columns {', '.join(names)}, "
            f"it has {', '.join(part.column_names)}"
        )
    return [part[name] for name in names]
