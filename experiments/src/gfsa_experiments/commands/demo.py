"""``gfsa demo``: a small decoder with and without filters, at equal steps and at equal time."""

from __future__ import annotations

import csv
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gfsa_experiments.results.statistics import PairedDifference
    from gfsa_experiments.runs.row import Row
    from gfsa_experiments.runs.run import Run

PLAIN, LONGER, FILTERED = "plain", "plain for the same time", "exclusive + depth"
# seeds below 100 chose the rates and 110 to 117 the filter (results/plans/demo.txt), on valid
_FIRST_SEED = 100
# plain's best on the validation part, for all variants: so short a run needs a long warm-up
_RATES: dict[str, Any] = {"lr": 4e-3, "warmup": 0.6}

Found = list[tuple["Row", list[tuple[int, float]]]]
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
    runs = [asdict(row) | {"curve": curve} for row, curve in found]
    numbers = {"findings": sentences, "cores": os.cpu_count(), "runs": runs}
    (out / "demo.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    console.print(
        f"{out / 'demo.png'} shows the curves. Next, on text of your own: gfsa train pretrain "
        "--set data=FOLDER --method plain,exclusive --set first_values=true --set filter_lr=0.1 "
        "--seeds 0-4"
    )


def train_all(seeds: int, steps: int, quick: bool = False) -> Found:
    """Every variant under every seed, several runs at a time.

    Plain trains again for as many steps as fit into the time that a filtered run took here.
    """
    import torch

    # a process of its own has one thread; the models are too small to be split
    torch.set_num_threads(1)
    jobs = 1 if quick else min(4, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:

        def carried_out(names: tuple[str, ...], steps: int) -> Found:
            runs = [
                run
                for name in names
                for run in _runs(name, seeds, steps, quick, out=Path(folder, name), jobs=jobs)
            ]
            # seed by seed, so that a busy machine slows the variants alike
            return _carry_out(sorted(runs, key=lambda run: run.config.seed), jobs)

        found = carried_out((PLAIN, FILTERED), steps)
        return found + carried_out((LONGER,), max(1, round(steps * time_ratio(found))))


def _runs(name: str, seeds: int, steps: int, quick: bool, **places: Any) -> list[Run]:
    """The runs of a variant."""
    from gfsa_experiments.runs.sweep import Request

    settings: dict[str, Any] = {"max_steps": steps, "eval_rows": 64}
    settings |= {"checkpoints": False, "tensorboard": False}
    settings |= _RATES
    if quick:
        settings |= {"depth": 2, "evaluations": 2, "test_rows": 64}
    if name == FILTERED:
        # at the model's rate the depth term hardly moves in so few steps
        settings |= {"first_values": True, "filter_lr": 0.1}
    request = Request(
        recipe="stdlib",
        methods=("exclusive" if name == FILTERED else "plain",),
        seeds=tuple(range(_FIRST_SEED, _FIRST_SEED + seeds)),
        settings=tuple((key, str(value)) for key, value in settings.items()),
    )
    return request.runs(device="cpu", **places)


def _carry_out(runs: list[Run], jobs: int) -> Found:
    from rich.progress import track

    from gfsa_experiments.runs.run_many import carry_out_all

    found: Found = []
    ended = carry_out_all(runs, jobs)
    for run, row, error in track(ended, f"{len(runs)} training runs", len(runs), transient=True):
        if row is None or error:
            raise RuntimeError(f"a run of the demo failed: {error}")
        with (run.folder / "curve.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        curve = [(int(line["step"]), float(line["valid bits_per_byte"])) for line in lines]
        found.append((replace(row, method=run.out.name, options="", settings=""), curve))
    return found


def time_ratio(found: Found) -> float:
    """The time of a filtered step relative to a plain one under the same seed, the median."""
    times = {(row.method, row.seed): row.seconds_per_step for row, _ in found}
    seeds = [seed for name, seed in times if name == FILTERED]
    return median(times[FILTERED, seed] / times[PLAIN, seed] for seed in seeds)


def difference(found: Found, name: str, reference: str) -> PairedDifference:
    """``name − reference`` over the seeds."""
    from gfsa_experiments.results.statistics import paired_difference

    own, other = (
        {row.seed: row.test for row, _ in found if row.method == which}
        for which in (name, reference)
    )
    change = paired_difference(other, own, higher_is_better=False)
    assert change is not None
    return change


def findings(found: Found) -> list[str]:
    """At equal steps, and at equal time."""
    from gfsa_experiments.results.report import interval

    words = {"better": "lower", "worse": "higher"}
    said = []
    for reference, at in ((PLAIN, "At equal steps"), (LONGER, "At equal time")):
        change = difference(found, FILTERED, reference)
        verdict = words.get(change.verdict or "", "neither lower nor higher, as far as this shows")
        said.append(
            f"{at}, {FILTERED} ends {verdict}: {interval(change, 3)} bits per byte, "
            f"lower under {change.seeds_better} of {len(change.seeds)} seeds."
        )
    return [*said, f"A filtered step took {time_ratio(found):.2f} times a plain one here."]


def draw(found: Found, path: Path) -> None:
    """The validation curve of each variant, the mean over the seeds."""
    from matplotlib.figure import Figure

    from gfsa.lens.colours import COLOURS, MARKERS, series_of
    from gfsa_experiments.results.report import save

    names = [PLAIN, LONGER, FILTERED]
    figure = Figure(figsize=(5, 3.1), layout="constrained")
    axis = figure.subplots()
    for name, n in zip(names, series_of(names), strict=True):
        curves = [curve for row, curve in found if row.method == name]
        steps = [step for step, _ in curves[0]]
        mean = [fmean(y for _, y in points) for points in zip(*curves, strict=True)]
        axis.plot(steps, mean, color=COLOURS[n], marker=MARKERS[n], markersize=3.5, label=name)
    axis.set(xlabel="step", ylabel="bits per byte on the validation part")
    axis.legend(frameon=False, fontsize=8)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path, dpi=200)
