"""The folder of one run: its path, and the JSON files that record settings, machine and result."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from gfsa.environment import commit, device_name, version_of
from gfsa_experiments.engine.checkpoints import checkpoints
from gfsa_experiments.engine.whole_files import write_text
from gfsa_experiments.runs.row import Row

Record = TypeVar("Record")

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


def is_begun(folder: Path) -> bool:
    """Whether a run can be resumed, or is finished."""
    return (folder / "row.json").exists() or bool(checkpoints(folder / "checkpoints"))


def write_config(
    folder: Path, config: dict[str, Any], defaults: dict[str, Any], resume: bool
) -> None:
    """Write ``config.json``, or check that a resumed run has the settings that it began with.

    Args:
        config: the settings and options of the run.
        defaults: what they are unless changed.
        resume: whether a run that is begun may be continued.
    """
    if not (folder / "config.json").exists() or not is_begun(folder):
        write_json(folder / "config.json", config)
        return
    if not resume:
        raise FileExistsError(
            f"{folder} holds a run already; --resume continues it, --out names another place, "
            "or delete it"
        )
    differing = differences(folder, config, defaults)
    if differing:
        raise ValueError(
            f"{folder} was begun with other settings ({', '.join(differing)}); use another --out"
        )


def differences(
    folder: Path, config: dict[str, Any], defaults: dict[str, Any], ignored: Sequence[str] = ()
) -> list[str]:
    """The settings that differ from those in the folder: ``lr: 0.1 → 0.2``.

    A setting that the version of the folder did not have had its default.
    """
    # through JSON, which turns tuples into lists
    new, usual = json.loads(json.dumps(config)), json.loads(json.dumps(defaults))
    old = usual | read_json(folder / "config.json")
    old["options"] = usual["options"] | old["options"]
    names = sorted((old.keys() | new.keys()) - set(ignored))
    return [f"{k}: {old.get(k)!r} → {new.get(k)!r}" for k in names if old.get(k) != new.get(k)]


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
    return read_record(folder / "row.json", Row)


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


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """A dataclass from a JSON file; None if there is no such file."""
    if not path.exists():
        return None
    try:
        return kind(**read_json(path))
    except TypeError as error:
        raise ValueError(f"{path} is of another version, delete its folder: {error}") from error
