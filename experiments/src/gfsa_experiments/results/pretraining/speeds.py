"""Tokens per second of the runs of pretraining, by size, arm and batch size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from gfsa_experiments.results.load_rows import read_folder_if_any
from gfsa_experiments.results.pretraining.arms import labelled, words_of


def speeds_of(times: pd.DataFrame) -> dict[tuple[str, str, int], float]:
    """Tokens per second of rows that had the GPU to themselves, by size, arm and batch size."""
    alone = labelled(times[(times.recipe == "pretrain") & (times.jobs == 1)], [], True)
    found: dict[tuple[str, str, int], float] = {}
    for row in alone.itertuples():
        speed = words_of(str(row.others)).get("tokens_per_second")
        if speed is not None and "residual=" not in str(row.settings):
            found[str(row.size), str(row.arm), int(str(row.batch_size))] = float(speed)
    return found


def read_speeds(folder: Path) -> dict[tuple[str, str, int], float]:
    """The same from ``times`` in a folder of results."""
    return speeds_of(read_folder_if_any(folder / "times").rows)


def speed_at(
    speeds: Mapping[tuple[str, str, int], float], size: str, arm: str, batch_size: int
) -> tuple[float, int] | None:
    """Tokens per second and the batch size they were measured at: this one, or the nearest."""
    measured = sorted(
        (abs(batch - batch_size), batch)
        for (of_size, of_arm, batch) in speeds
        if (of_size, of_arm) == (size, arm)
    )
    if not measured:
        return None
    batch = measured[0][1]
    return speeds[size, arm, batch], batch
