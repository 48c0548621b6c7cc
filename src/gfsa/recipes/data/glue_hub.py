"""GLUE from the Hugging Face hub, for those who have the package ``datasets`` and no files."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

REPOSITORY = "nyu-mll/glue"


def fetch(task: str, parts: Sequence[str], missing: FileNotFoundError) -> list[tuple[str, Any]]:
    """Some parts of a task, each with its name, from the hub or from what it left on the disk.

    Args:
        task: as the hub calls it.
        parts: likewise.
        missing: what was not found among files; raised again if the hub does not help.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise FileNotFoundError(
            f"{missing}; or pip install datasets, which fetches {REPOSITORY} from the hub"
        ) from None
    try:
        found = [datasets.load_dataset(REPOSITORY, task, split=part) for part in parts]
    except Exception as error:
        raise FileNotFoundError(
            f"{missing}. {REPOSITORY} could not be had from the hub either: "
            f"{type(error).__name__}: {error}"
        ) from error
    warnings.warn(f"{missing}. It is taken from {REPOSITORY} on the hub instead", stacklevel=3)
    return [(f"{REPOSITORY} {task} {part}", one) for part, one in zip(parts, found, strict=True)]
