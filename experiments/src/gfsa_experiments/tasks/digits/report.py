"""The demo's table and its file of numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from gfsa_experiments.tasks.digits.experiment import Run, Settings
from gfsa_experiments.tasks.digits.summary import Summary, closing


def table(summaries: Sequence[Summary], settings: Settings) -> Table:
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
        difference = summary.accuracy_difference
        states = summary.similarity
        # what leaves the first, the middle and the last layer
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


def write_numbers(
    path: Path,
    runs: Sequence[Run],
    summaries: Sequence[Summary],
    settings: Settings,
    environment: dict[str, Any],
) -> None:
    """Every number of the demo as JSON."""
    numbers = {
        "settings": asdict(settings),
        "environment": environment,
        "findings": closing(summaries),
        "summaries": [asdict(summary) for summary in summaries],
        "runs": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps(_finite(numbers), indent=1) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no infinity: an interval without an end gets null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if value in (float("inf"), float("-inf")) else value
