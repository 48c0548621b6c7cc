"""The folder of one run: its path, and the JSON files that record settings, machine and result."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import sys
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

from gfsa.environment import commit, device_name, version_of
from gfsa_experiments.engine.checkpoints import checkpoints
from gfsa_experiments.engine.config import HARMLESS
from gfsa_experiments.engine.whole_files import write_text
from gfsa_experiments.runs.row import Row

_PACKAGES = (
    "torch",
    "accelerate",
    "transformers",
    "tokenizers",
    "timm",
    "torch-geometric",
    "speechbrain",
    "torchmetrics",
    "scikit-learn",
    "numpy",
)


def run_folder(
    out: Path, recipe: str, label: str, method: str, options: str, settings: str, seed: int
) -> Path:
    """The path of a run's folder, which is unique to its settings."""
    name = _file_name(f"{method} {options}")
    if settings:
        name += "-" + sha256(settings.encode()).hexdigest()[:8]
    return out / recipe / _file_name(label) / name / f"seed-{seed}"


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", text.strip()).strip("_")


def claim(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Begin a run in its folder, or check that the one that is there may be continued.

    Of a finished run harmless settings may differ. A run without a checkpoint begins again.
    """
    is_finished = (folder / "row.json").exists()
    if not is_finished and not checkpoints(folder / "checkpoints"):
        (folder / "data.json").unlink(missing_ok=True)
        write_json(folder / "config.json", settings)
        return
    if not resume:
        raise FileExistsError(
            f"{folder} holds a run already; --resume continues it, --out names another place, "
            "or delete it"
        )
    # through JSON, which turns tuples into lists
    old, new = read_json(folder / "config.json"), json.loads(json.dumps(settings))
    names = sorted((old.keys() | new.keys()) - set(HARMLESS if is_finished else ()))
    differing = [f"{k}: {old.get(k)!r} → {new.get(k)!r}" for k in names if old.get(k) != new.get(k)]
    if differing:
        raise ValueError(
            f"{folder} holds a run with other settings ({', '.join(differing)}); use another --out"
        )


def write_environment(folder: Path, device: Any) -> None:
    """Write ``environment.json``: machine, versions and command."""
    record = {
        "device": device_name(device),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version_of(name) for name in _PACKAGES if version_of(name)},
        "commit": commit(),
        "command": " ".join(["gfsa", *sys.argv[1:]]),
        "date": now(),
    }
    write_json(folder / "environment.json", record)


def write_row(folder: Path, row: Row) -> None:
    write_json(folder / "row.json", dataclasses.asdict(row))


def read_row(folder: Path) -> Row | None:
    """The result of a finished run; None if it is not finished."""
    path = folder / "row.json"
    if not path.exists():
        return None
    try:
        return Row(**read_json(path))
    except TypeError as error:
        raise ValueError(f"{path} is of another version, delete its folder: {error}") from error


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_json(path: Path, data: Any) -> None:
    """Write a whole file, or nothing if interrupted."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged, delete its folder to run again: {error}") from error
