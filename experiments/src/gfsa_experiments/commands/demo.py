"""``gfsa demo``: a small decoder with and without filters, at equal steps and at equal time."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

PLAIN, LONGER, FILTERED = "plain", "plain for the same time", "exclusive + depth"
# seeds below 100 chose the rates and 110 to 117 the filter (results/plans/demo.txt), on valid
_FIRST_SEED = 100
_SETTINGS: dict[str, Any] = {"eval_rows": 64, "checkpoints": False, "tensorboard": False}
# plain's best on the validation part, for all variants: so short a run needs a long warm-up
_SETTINGS |= {"lr": 4e-3, "warmup": 0.6}
_QUICK = {"depth": 2, "evaluations": 2, "test_rows": 64}
# at the model's rate the depth term hardly moves in so few steps
_FILTER = {"first_values": True, "filter_lr": 0.1}

Found = list[dict[str, Any]]
"""The row of each run, whose method is the variant, and its validation curve."""


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 500,
    out: Annotated[Path, typer.Option(help="Where picture and numbers go.")] = Path("gfsa-demo"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds, to see that it runs; shows nothing.")
    ] = False,
) -> None:
    """Train a small decoder plain, plain for longer, and with filters; say which ends lower.

    Example: gfsa demo --seeds 8 --out my-demo
    """
    from rich.console import Console

    from gfsa_experiments.engine.whole_files import refuse_inside_file

    try:
        refuse_inside_file(out / "demo.json")
    except ValueError as error:
        raise typer.BadParameter(f"--out {out}: {error}") from error
    console = Console()
    console.print(
        "What this shows: with filters a small decoder learns more in each step. On a CPU its "
        "steps take longer, so at equal time little may remain (results/pretraining.md has longer "
        "runs on a GPU). Bytes of Python's own library, "
        f"{seeds} seeds each: plain, plug(model, filter=gfsa.Exclusive, depth=True), and plain for "
        "the same time. Intervals are of 95 %."
    )
    found = train_all(seeds if not quick else 2, 20 if quick else steps, quick)
    sentences = findings(found)
    for sentence in sentences:
        console.print(sentence)
    out.mkdir(parents=True, exist_ok=True)
    draw(found, out / "demo.png")
    numbers = {"findings": sentences, "cores": os.cpu_count(), "runs": found}
    (out / "demo.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    console.print(
        f"{out / 'demo.png'} shows the curves. Next, on text of your own: gfsa train pretrain "
        "--set data=FOLDER --method plain,exclusive --set first_values=true --set filter_lr=0.1 "
        "--seeds 0-4"
    )


def train_all(seeds: int, steps: int, quick: bool) -> Found:
    """Every variant under every seed, several runs at a time.

    Plain trains again for as many steps as fit into the time that a filtered run took here.
    """
    import torch

    # a process of its own has one thread; the models are too small to be split
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = _carry_out([PLAIN, FILTERED], seeds, steps, quick, Path(folder))
        longer = max(1, round(steps * time_ratio(found)))
        return found + _carry_out([LONGER], seeds, longer, quick, Path(folder))


def _carry_out(names: list[str], seeds: int, steps: int, quick: bool, folder: Path) -> Found:
    import pandas as pd
    from rich.progress import track

    from gfsa_experiments.runs.sweep import Request, carry_out_all

    jobs = 1 if quick else min(4, os.cpu_count() or 1)
    runs = []
    for name in names:
        settings = {"max_steps": steps} | _SETTINGS | (_QUICK if quick else {})
        settings |= _FILTER if name == FILTERED else {}
        request = Request(
            "stdlib",
            "exclusive" if name == FILTERED else "plain",
            seeds=f"{_FIRST_SEED}-{_FIRST_SEED + seeds - 1}",
            setting=[f"{key}={value}" for key, value in settings.items()],
        )
        runs += request.runs(device="cpu", jobs=jobs, out=folder / name)
    # seed by seed, so that a busy machine slows the variants alike
    runs.sort(key=lambda run: run.config.seed)
    found: Found = []
    ended = carry_out_all(runs, jobs)
    for run, row, error in track(ended, f"{len(runs)} training runs", len(runs), transient=True):
        if row is None or error:
            raise RuntimeError(f"a run of the demo failed: {error}")
        curve = pd.read_csv(run.folder / "curve.csv")
        points = list(zip(curve["step"].tolist(), curve["valid bits_per_byte"], strict=True))
        variant = {"method": run.out.name, "options": "", "settings": "", "curve": points}
        found.append(asdict(row) | variant)
    return found


def _by_variant(found: Found, column: str) -> Any:
    """One number of each run: a line per seed, a column per variant."""
    import pandas as pd

    return pd.DataFrame(found).pivot(index="seed", columns="method", values=column)


def time_ratio(found: Found) -> float:
    """The time of a filtered step relative to a plain one under the same seed, the median."""
    times = _by_variant(found, "seconds_per_step")
    return float((times[FILTERED] / times[PLAIN]).median())


def findings(found: Found) -> list[str]:
    """At equal steps, and at equal time."""
    from gfsa_experiments.results.report import interval
    from gfsa_experiments.results.statistics import paired_difference

    words = {"better": "lower", "worse": "higher"}
    ends = _by_variant(found, "test").to_dict()
    said = []
    for reference, at in ((PLAIN, "At equal steps"), (LONGER, "At equal time")):
        change = paired_difference(ends[reference], ends[FILTERED], higher_is_better=False)
        assert change is not None
        verdict = words.get(change.verdict or "", "neither lower nor higher, as far as this shows")
        said.append(
            f"{at}, {FILTERED} ends {verdict}: {interval(change, 3)} bits per byte, "
            f"lower under {change.seeds_better} of {len(change.seeds)} seeds."
        )
    return [*said, f"A filtered step took {time_ratio(found):.2f} times a plain one here."]


def draw(found: Found, path: Path) -> None:
    """The validation curve of each variant, the mean over the seeds."""
    import matplotlib

    from gfsa.lens.colours import COLOURS, MARKERS, series_of
    from gfsa.lens.figures import STYLE, LensFigure

    names = [PLAIN, LONGER, FILTERED]
    with matplotlib.rc_context(STYLE):
        figure = LensFigure(figsize=(5, 3.1), layout="constrained")
        axis = figure.subplots()
        for name, n in zip(names, series_of(names), strict=True):
            curves = [run["curve"] for run in found if run["method"] == name]
            mean = [fmean(y for _, y in points) for points in zip(*curves, strict=True)]
            steps = [step for step, _ in curves[0]]
            axis.plot(steps, mean, color=COLOURS[n], marker=MARKERS[n], label=name)
        axis.set(xlabel="step", ylabel="bits per byte on the validation part")
        axis.legend()
    figure.savefig(path, dpi=200)
