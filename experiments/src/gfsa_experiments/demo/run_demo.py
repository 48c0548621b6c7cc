"""The demo: train every variant under every seed, then print, write and draw the results."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import gfsa
from gfsa.environment import commit, cpu_name
from gfsa.info import versions
from gfsa.lens.metrics import cosine_similarity
from gfsa_experiments.demo.summary import DemoRun, findings, table_of
from gfsa_experiments.results.figures import plot
from gfsa_experiments.runs.load_run import trained_task
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run import Run, carry_out
from gfsa_experiments.tasks.digits.recipe import DigitsConfig, DigitsViT, load_digits

# coefficients move by tenths, weights by hundredths: filters get a larger learning rate
FILTER_LR_MULTIPLIER = 10.0


@dataclass(frozen=True)
class DemoSettings:
    """What the caller of the demo can change."""

    seeds: int = 4
    epochs: int = 8
    depth: int = 12
    K: int = 3
    held_out: Literal["test", "validation"] = "test"
    """The images that are reported; settings were chosen on the validation images."""

    @property
    def images(self) -> torch.Tensor:
        """The held-out images."""
        return load_digits()["test" if self.held_out == "test" else "valid"].columns["images"]


def variants(settings: DemoSettings) -> dict[str, tuple[str, MethodConfig]]:
    """Name → method and options; the others are compared with the first."""
    filtered = MethodConfig(lr_multiplier=FILTER_LR_MULTIPLIER)
    return {
        "plain": ("plain", MethodConfig()),
        "degree 1": ("degree1", filtered),
        f"GFSA K={settings.K}": ("gfsa", replace(filtered, K=settings.K)),
    }


def run_demo(settings: DemoSettings, out: Path, console: Console) -> list[DemoRun]:
    """Carry out the runs of ``settings``, print the results and write everything into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    # the model is too small to be split: threads would only wait for each other
    torch.set_num_threads(1)
    start = time.perf_counter()
    with Progress(console=console) as progress:
        runs, models = train_all(settings, progress)
    seconds = time.perf_counter() - start
    console.print(shown_table(runs, settings))
    for sentence in findings(runs):
        console.print(sentence)
    numbers = {
        "settings": asdict(settings),
        "environment": {
            **versions(),
            "commit": commit(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "seconds": round(seconds, 1),
        },
        "findings": findings(runs),
        "runs": [{"variant": run.row.method, **asdict(run)} for run in runs],
    }
    (out / "demo.json").write_text(json.dumps(numbers, indent=1) + "\n")
    report = gfsa.diagnose(models, settings.images, spectral_samples=len(settings.images))
    report.data = f"the {settings.held_out} images of the digits, models of the first seed"
    report.to_html(out / "lens.html")
    report.to_json(out / "lens.json")
    for suffix in ("png", "svg"):
        plot([table_of(runs)], out / f"accuracy.{suffix}")
        for name in ("similarity", "response"):
            report.figures[name].savefig(out / f"{name}.{suffix}", dpi=200)
    console.print(
        f"{seconds:.0f} s. Figures (similarity, accuracy, response) and demo.json are in {out}/. "
        f"Open {out / 'lens.html'} to look into the trained models, layer by layer and head by head"
    )
    return runs


def train_all(
    settings: DemoSettings, progress: Progress
) -> tuple[list[DemoRun], dict[str, DigitsViT]]:
    """All runs, and the models of the first seed.

    Seed by seed, so that a busy machine slows all variants alike.
    """
    chosen = variants(settings)
    bar = progress.add_task("training", total=None)
    runs: list[DemoRun] = []
    models: dict[str, DigitsViT] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(settings.seeds):
            for variant, (method, options) in chosen.items():
                progress.update(bar, description=f"{variant}, seed {seed + 1} of {settings.seeds}")

                def on_step(step: int, steps: int, text: str) -> None:
                    total = settings.seeds * len(chosen) * steps
                    progress.update(bar, completed=len(runs) * steps + step, total=total)

                run = Run(
                    recipe="digits",
                    config=_config(settings, seed),
                    method=method,
                    options=options,
                    out=Path(folder),
                    device="cpu",
                )
                row = carry_out(run, on_step)
                model = trained_task(run.folder, Path()).model
                assert isinstance(model, DigitsViT)
                runs.append(_measured(variant, row, model, settings))
                if seed == 0:
                    models[variant] = model
    progress.update(bar, description="done")
    return runs, models


def _config(settings: DemoSettings, seed: int) -> DigitsConfig:
    return DigitsConfig(
        seed=seed,
        epochs=settings.epochs,
        depth=settings.depth,
        log_every=4,
        checkpoints=False,
        tensorboard=False,
        save_model=True,
    )


def _measured(variant: str, row: Row, model: DigitsViT, settings: DemoSettings) -> DemoRun:
    if settings.held_out == "validation":
        assert row.valid is not None
        row = replace(row, test=row.valid)
    filters = gfsa.filters_of(model).values()
    with torch.no_grad():
        states = model.tokens(settings.images)
    return DemoRun(
        row=replace(row, method=variant, options=""),
        similarity=[cosine_similarity(state.double()).mean().item() for state in states],
        coefficients=[graph_filter.coefficients().tolist() for graph_filter in filters],
    )


def shown_table(runs: Sequence[DemoRun], settings: DemoSettings) -> Table:
    """A row for each variant."""
    table = Table(
        title=(
            f"A {settings.depth}-layer ViT of {runs[0].row.parameters:,} parameters on digits, "
            f"epochs: {settings.epochs}, seeds: {settings.seeds}"
        ),
        title_justify="left",
    )
    table.add_column("attention", no_wrap=True)
    for heading in (
        f"{settings.held_out} acc. %",
        "paired diff.",
        "numbers\nadded",
        "time\n× plain",
        "similarity\nfirst mid last",
    ):
        table.add_column(heading, justify="right")
    for line in table_of(runs).lines:
        states = [run.similarity for run in runs if run.row.method == line.method]
        # after the first, the middle and the last layer
        depths = (1, len(states[0]) // 2, -1)
        table.add_row(
            line.method,
            f"{line.mean:.2f} ± {line.std or 0:.2f}",
            "–" if line.difference is None else f"{line.difference.mean:+.2f}",
            ", ".join(map(str, line.added)),
            " ".join(f"{ratio:.2f}" for ratio in line.times) or "1.00",
            " ".join(f"{fmean(state[at] for state in states):.2f}" for at in depths),
        )
    return table
