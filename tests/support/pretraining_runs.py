"""Runs of pretraining whose answer is known: as tables, and as a folder of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.results.families import read_family
from gfsa_experiments.runs.row import Row, append_rows
from gfsa_experiments.runs.run import Key

PARAMETERS = {"15M": 15_000_000, "46M": 46_000_000, "110M": 110_000_000}
Law = Callable[[float], float]


def runs(
    lengths: Mapping[str, Sequence[float]],
    gap: Law,
    seeds: Sequence[int] = (0, 1),
    noise: float = 0.0,
) -> pd.DataFrame:
    """Runs of plain, whose loss is 4 − log(tokens per parameter)/5, and of GFSA, ``gap`` from it.

    Args:
        lengths: tokens per parameter by size.
    """
    random = np.random.default_rng(0)
    rows = []
    for size, ratios in lengths.items():
        for ratio in ratios:
            for seed in seeds:
                plain = 4 - math.log(ratio) / 5 + 0.1 * seed
                end = plain + gap(ratio) + noise * random.normal()
                for arm, loss in (("plain", plain), ("GFSA", end)):
                    row = {"arm": arm, "size": size, "seed": seed, "test": loss, "valid": loss}
                    row |= {"parameters": PARAMETERS[size], "ratio": ratio, "batch_size": 32}
                    row |= {"tokens": round(ratio * PARAMETERS[size]), "task": size}
                    row |= {"method": arm, "options": "", "settings": f"ratio={ratio}"}
                    rows.append(row)
    return pd.DataFrame(rows)


def curve(size: str, arm: str, seed: int, tokens: Iterable[float], loss: Law) -> pd.DataFrame:
    points = [(at, loss(at)) for at in tokens]
    lines = pd.DataFrame(points, columns=["tokens", "valid loss"])
    return lines.assign(
        task=size, method=arm, options="", settings="ratio=10", seed=seed, arm=arm, size=size
    )


def probe_lines(arm: str, seed: int, more: float) -> list[dict[str, Any]]:
    """Losses are those of plain and ``more``; attention is the same but for a sink."""
    values = {
        "induction first": [9.0],
        "induction second": [1.0 + more],
        "recall first": [9.0],
        "recall second": [3.0 + 2 * more],
        # tokens 1; 2–3; 4–7; 8–15; … 128–255; and what is left of the next group
        "position": [8.0, 5.0, 5.0, 5.0, 4.0, 4.0, 4.0, 3.0 + more, 99.0],
        "frequency": [6.0 + more, *[2.0] * 8, 1.0],
    }
    run = {"task": "15M", "method": arm, "options": "", "settings": "", "seed": seed, "arm": arm}
    lines = [{**run, "probe": name, "values": text(v)} for name, v in values.items()]
    for layer in (1, 2):
        lines.append({**run, "probe": "entropy", "layer": layer, "values": "0.2 0.4"})
        lines.append({**run, "probe": "sink", "layer": layer, "values": f"0.1 {0.2 * layer}"})
    return lines


def text(values: Sequence[float]) -> str:
    return " ".join(map(str, values))


COMMON = "common --set size=15m --set batch_size=32 --set gain_lr=0.1"
PLAN = f"""{COMMON}
pretrain --method plain --each epochs=0.3,1,3 --seeds 0-1
pretrain --method gfsa --set filter_lr=0.1 --each epochs=0.3,1,3 --seeds 0-1
"""
FAMILY = """
registered = 2026-01-01T00:00:00Z
recipe = "pretrain"
metric = "loss"
seeds = "100-101"
settings = "size=15m batch_size=32 gain_lr=0.1 epochs=3"
[lines]
plain = "plain"
gfsa = "gfsa filter_lr=0.1"
[[comparison]]
a = "gfsa"
b = "plain"
"""


def row(key: Key, gap: float) -> Row:
    steps = {"0.3": 480, "3.0": 4800}.get(key.settings.partition("epochs=")[2].split(" ")[0], 1600)
    plain = 3 - steps / 4800
    return Row(
        **key._asdict(),
        metric="loss",
        higher_is_better=False,
        test=plain if key.method == "plain" else plain + gap,
        valid=plain if key.method == "plain" else plain + gap,
        steps=steps,
        parameters=15_000_120 if key.method == "gfsa" else 15_000_000,
        added=120 if key.method == "gfsa" else 0,
        commit="abc",
        date="2026-02-01T00:00:00+00:00",
        data="10+10+10 abc",
    )


def study_folder(tmp_path: Path) -> Path:
    """A folder of results: two seeds of three lengths, and a family without its runs."""
    for name in ("plans", "families", "tuning"):
        (tmp_path / name).mkdir()
    (tmp_path / "plans/pretrain-scaling-15m.txt").write_text(PLAN)
    (tmp_path / "families/pretrain.toml").write_text(FAMILY)
    keys = [run.key() for run in runs_of_plan(tmp_path / "plans/pretrain-scaling-15m.txt")]
    # a run that no plan asks for
    stray = keys[0]._replace(settings=f"{keys[0].settings} weight_decay=0.2")
    append_rows(tmp_path / "tuning/pretrain.csv", [row(key, -0.1) for key in [*keys, stray]])
    return tmp_path


def add_family_runs(folder: Path, methods: Sequence[str], name: str = "pretrain") -> None:
    keys = sorted(read_family(folder / f"families/{name}.toml").keys)
    own = [row(key, -0.5) for key in keys if key.method in methods]
    append_rows(folder / "pretrain.csv", own)
