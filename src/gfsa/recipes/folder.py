"""The folder of one run: what was asked for, on what it ran, what came of it."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

from gfsa.bench.environment import commit, device_name, version_of
from gfsa.recipes.checkpoints import checkpoints
from gfsa.recipes.row import Row

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


def slug(text: str) -> str:
    """``text`` as a name of a file."""
    return re.sub(r"[^\w.=-]+", "_", text.strip()).strip("_")


def run_folder(
    out: Path, recipe: str, label: str, method: str, options: str, settings: str, seed: int
) -> Path:
    """Where a run lies: the same for the same settings, another for others."""
    name = slug(f"{method} {options}")
    if settings:
        name += "-" + sha256(settings.encode()).hexdigest()[:8]
    return out / recipe / slug(label) / name / f"seed-{seed}"


def write_json(path: Path, data: Any) -> None:
    """Write a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    unfinished.replace(path)


def write_config(folder: Path, config: dict[str, Any], resume: bool) -> None:
    """Note what is run, or check that an interrupted run is asked to go on as it began."""
    path = folder / "config.json"
    if not path.exists() or not is_begun(folder):
        write_json(path, config)
        return
    if not resume:
        raise FileExistsError(
            f"{folder} holds a run already; --resume goes on with it, --out names another place, "
            "or delete it"
        )
    differing = differences(folder, config)
    if differing:
        raise ValueError(
            f"{folder} was begun with other settings ({', '.join(differing)}); use another --out"
        )


def is_begun(folder: Path) -> bool:
    """Whether there is anything of a run to go on with."""
    return (folder / "row.json").exists() or bool(checkpoints(folder / "checkpoints"))


@dataclass(frozen=True)
class RunData:
    """What a run is trained and measured on, and where that lay."""

    data: str
    """As in its row."""
    data_dir: str
    """The whole path: it stays in the run's folder, rows are for others to see."""


def write_data(folder: Path, data: RunData) -> None:
    write_json(folder / "data.json", dataclasses.asdict(data))


def read_data(folder: Path) -> RunData | None:
    """What a run began with; None if it is of a version that did not write it down."""
    path = folder / "data.json"
    if not path.exists():
        return None
    try:
        return RunData(**read_json(path))
    except TypeError as error:
        raise ValueError(f"{path} is of another version, delete its folder: {error}") from error


def differences(folder: Path, config: dict[str, Any], ignored: Sequence[str] = ()) -> list[str]:
    """Where a run's settings are others than those in its folder: ``lr: 0.1 → 0.2``."""
    # through JSON, as the old one came: tuples are lists there
    old, new = read_json(folder / "config.json"), json.loads(json.dumps(config))
    names = sorted((old.keys() | new.keys()) - set(ignored))
    return [f"{k}: {old.get(k)!r} → {new.get(k)!r}" for k in names if old.get(k) != new.get(k)]


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged, delete its folder to run anew: {error}") from error


def environment(device: Any) -> dict[str, Any]:
    return {
        "device": device_name(device),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version_of(name) for name in _PACKAGES if version_of(name)},
        "commit": commit(),
        "command": command_line(),
        "date": now(),
    }


def command_line() -> str:
    """The arguments as typed."""
    return " ".join(["gfsa", *sys.argv[1:]])


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_metrics(folder: Path, history: list[dict[str, Any]]) -> None:
    """Metrics over time, one line each."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / ".metrics.jsonl"
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in history))
    unfinished.replace(folder / "metrics.jsonl")


def write_curve(folder: Path, curve: list[dict[str, float]]) -> None:
    """What ``valid`` said over time: step, tokens, seconds of training, and the measure."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / ".curve.csv"
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(curve[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(curve)
    unfinished.replace(folder / "curve.csv")


def write_row(folder: Path, row: Row) -> None:
    write_json(folder / "row.json", dataclasses.asdict(row))


def read_row(folder: Path) -> Row | None:
    """The result of a finished run, or None."""
    path = folder / "row.json"
    if not path.exists():
        return None
    try:
        return Row(**read_json(path))
    except TypeError as error:
        raise ValueError(f"{path} is of another version, delete its folder: {error}") from error
