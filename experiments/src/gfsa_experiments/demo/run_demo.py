"""The demo: train every variant under every seed, then print, write and draw the results."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

import gfsa
from gfsa.environment import commit, cpu_name
from gfsa.info import versions
from gfsa.lens.metrics import cosine_similarity
from gfsa_experiments.demo.figures import draw
from gfsa_experiments.demo.summary import DemoRun, Summary, closing, summarise
from gfsa_experiments.runs.load_run import trained_task
from gfsa_experiments.runs.methods import MethodConfig
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
    def split(self) -> str:
        return "test" if self.held_out == "test" else "valid"


def variants(settings: DemoSettings) -> dict[str, tuple[str, MethodConfig]]:
    """Name → method and options; the others are compared with the first."""
    return {
        "plain": ("plain", MethodConfig()),
        "degree 1": ("degree1", MethodConfig(lr_multiplier=FILTER_LR_MULTIPLIER)),
        f"GFSA K={settings.K}": (
            "gfsa",
            MethodConfig(K=settings.K, lr_multiplier=FILTER_LR_MULTIPLIER),
        ),
    }


def run_demo(settings: DemoSettings, out: Path, console: Console) -> list[Summary]:
    """Carry out the runs of ``settings``, print the results and write everything into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    # the model is too small to be split: threads would only wait for each other
    torch.set_num_threads(1)
    start = time.perf_counter()
    with Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        runs, models = train_all(settings, progress)
    seconds = time.perf_counter() - start
    summaries = summarise(runs)
    console.print(table(summaries, settings))
    for sentence in closing(summaries):
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
        "findings": closing(summaries),
        "summaries": [asdict(summary) for summary in summaries],
        "runs": [asdict(run) for run in runs],
    }
    (out / "demo.json").write_text(json.dumps(numbers, indent=1) + "\n")
    draw(runs, summaries, settings.held_out, out)
    images = load_digits()[settings.split].images
    report = gfsa.diagnose(models, images, spectral_samples=len(images))
    report.data = f"the {settings.held_out} images of the digits, models of the first seed"
    report.to_html(out / "lens.html")
    report.to_json(out / "lens.json")
    console.print(
        f"{seconds:.0f} s. Figures (similarity, accuracy, response) and demo.json are in {out}/. "
        f"Open {out / 'lens.html'} to look into the trained models, layer by layer and head by head"
    )
    return summaries


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
                description = f"{variant}, seed {seed + 1} of {settings.seeds}"

                def on_step(step: int, steps: int, text: str, words: str = description) -> None:
                    progress.update(
                        bar,
                        description=words,
                        completed=len(runs) * steps + step,
                        total=settings.seeds * len(chosen) * steps,
                    )

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
                runs.append(_measured(variant, seed, row, model, settings))
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


def _measured(
    variant: str, seed: int, row: Any, model: DigitsViT, settings: DemoSettings
) -> DemoRun:
    filters = gfsa.filters_of(model).values()
    with torch.no_grad():
        states = model.tokens(load_digits()[settings.split].images)
    return DemoRun(
        variant=variant,
        seed=seed,
        accuracy=row.test if settings.split == "test" else row.valid,
        seconds=row.seconds,
        parameters=row.parameters,
        filter_parameters=row.added,
        similarity=[cosine_similarity(state.double()).mean().item() for state in states],
        coefficients=[graph_filter.coefficients().tolist() for graph_filter in filters],
    )


def table(summaries: Sequence[Summary], settings: DemoSettings) -> Table:
    """A row for each variant."""
    shown = Table(
        title=(
            f"A {settings.depth}-layer ViT of {summaries[0].parameters:,} parameters on digits, "
            f"epochs: {settings.epochs}, seeds: {settings.seeds}"
        ),
        title_justify="left",
    )
    shown.add_column("attention", no_wrap=True)
    for heading in (
        f"{settings.held_out} acc. %",
        "paired diff.",
        "numbers\nadded",
        "time\n× plain",
        "similarity\nfirst mid last",
    ):
        shown.add_column(heading, justify="right")
    for summary in summaries:
        difference, states = summary.accuracy_difference, summary.similarity
        # after the first, the middle and the last layer
        depths = (states[1], states[len(states) // 2], states[-1])
        shown.add_row(
            summary.variant,
            f"{summary.accuracy:.2f} ± {summary.accuracy_std:.2f}",
            "–" if difference is None else f"{difference.mean:+.2f}",
            f"{summary.parameters_added}",
            f"{summary.time_ratio:.2f}",
            " ".join(f"{value:.2f}" for value in depths),
        )
    return shown
