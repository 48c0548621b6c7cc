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
    try:
        import matplotlib  # noqa: F401
        from rich.console import Console

        from gfsa_experiments.engine.whole_files import refuse_inside_file
    except ModuleNotFoundError as error:
        typer.echo(
            f"gfsa demo needs {error.name}. In a checkout of gfsa: pip install ./experiments",
            err=True,
        )
        raise typer.Exit(1) from error
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
        "the same time."
    )
    found = train_all(seeds if not quick else 2, 20 if quick else steps, quick)
    sentences = findings(found)
    for sentence in sentences:
        console.print(sentence)
    out.mkdir(parents=True, exist_ok=True)
    for ending in ("png", "svg"):
        draw(found, out / f"demo.{ending}")
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
        every = range(_FIRST_SEED, _FIRST_SEED + seeds)
        # seed by seed, so that a busy machine slows the variants alike
        plans = [(name, seed, steps) for seed in every for name in (PLAIN, FILTERED)]
        found = _carry_out({plan: _run(*plan, Path(folder), jobs, quick) for plan in plans}, jobs)
        longer = max(1, round(steps * time_ratio(found)))
        plans = [(LONGER, seed, longer) for seed in every]
        runs = {plan: _run(*plan, Path(folder), jobs, quick) for plan in plans}
        return found + _carry_out(runs, jobs)


def _run(name: str, seed: int, steps: int, folder: Path, jobs: int, quick: bool) -> Run:
    from gfsa_experiments.runs.methods import MethodConfig
    from gfsa_experiments.runs.run import Run
    from gfsa_experiments.tasks.pretrain.recipe import StdlibConfig

    given: dict[str, Any] = {"checkpoints": False, "tensorboard": False, "eval_rows": 64}
    if quick:
        given |= {"depth": 2, "evaluations": 2, "test_rows": 64}
    filtered = name == FILTERED
    # at the model's rate the depth term hardly moves in so few steps
    options = MethodConfig(first_values=True, filter_lr=0.1) if filtered else MethodConfig()
    return Run(
        recipe="stdlib",
        config=StdlibConfig(seed=seed, max_steps=steps, **_RATES, **given),
        method="exclusive" if filtered else "plain",
        options=options,
        # plain for longer has as many steps as plain where the times are equal
        out=folder / name.replace(" ", "-"),
        device="cpu",
        jobs=jobs,
    )


def _carry_out(runs: dict[tuple[str, int, int], Run], jobs: int) -> Found:
    from rich.progress import track

    from gfsa_experiments.runs.run_many import carry_out_all

    rows = {}
    ended = carry_out_all(list(runs.values()), jobs)
    for run, row, error in track(ended, f"{len(runs)} training runs", len(runs), transient=True):
        if row is None or error:
            raise RuntimeError(f"a run of the demo failed: {error}")
        rows[run.folder] = row
    found: Found = []
    for (name, _, _), run in runs.items():
        with (run.folder / "curve.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        curve = [(int(line["step"]), float(line["valid bits_per_byte"])) for line in lines]
        found.append((replace(rows[run.folder], method=name, options="", settings=""), curve))
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
    words = {"better": "lower", "worse": "higher"}
    said = []
    for reference, at in ((PLAIN, "At equal steps"), (LONGER, "At equal time")):
        change = difference(found, FILTERED, reference)
        ends = ""
        if change.low is not None and change.high is not None:
            ends = f" (95 % interval {change.low:+.3f} to {change.high:+.3f})"
        verdict = words.get(change.verdict or "", "neither lower nor higher, as far as this shows")
        said.append(
            f"{at}, {FILTERED} ends {verdict}: {change.mean:+.3f} bits per byte{ends}, "
            f"lower under {change.seeds_better} of {len(change.seeds)} seeds."
        )
    return [*said, f"A filtered step took {time_ratio(found):.2f} times a plain one here."]


def draw(found: Found, path: Path) -> None:
    """The validation curve of each variant, and the paired differences to plain."""
    from matplotlib.figure import Figure

    from gfsa.lens.colours import COLOURS, MARKERS, series_of
    from gfsa_experiments.results.figures import save

    names = [PLAIN, LONGER, FILTERED]
    looks = {
        name: (COLOURS[n], MARKERS[n]) for name, n in zip(names, series_of(names), strict=True)
    }
    figure = Figure(figsize=(7.6, 3.1), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    for name, (colour, marker) in looks.items():
        own = [curve for row, curve in found if row.method == name]
        mean = [(points[0][0], fmean(y for _, y in points)) for points in zip(*own, strict=True)]
        look = {"color": colour, "marker": marker, "markersize": 3.5, "label": name}
        curves.plot(*zip(*mean, strict=True), **look)
    curves.set(xlabel="step", ylabel="bits per byte on the validation part")
    curves.legend(frameon=False, fontsize=8)
    for at, name in enumerate((LONGER, FILTERED)):
        change, (colour, marker) = difference(found, name, PLAIN), looks[name]
        differences.scatter(change.values, [at - 0.16] * len(change.values), 18, colour, alpha=0.6)
        if change.low is not None and change.high is not None:
            differences.plot([change.low, change.high], [at, at], color=colour, linewidth=2)
        differences.plot(change.mean, at, color=colour, marker=marker)
    differences.axvline(0, color=looks[PLAIN][0], linewidth=1.6)
    differences.set_yticks([0, 1], [LONGER.replace(" for", "\nfor"), FILTERED])
    differences.set_ylim(1.5, -0.5)
    differences.set_xlabel("bits per byte − plain (left is better)")
    for axis in (curves, differences):
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, path, dpi=200)
