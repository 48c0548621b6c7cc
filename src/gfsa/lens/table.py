"""The report as tables in a terminal."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean
from typing import TYPE_CHECKING

from gfsa.lens.findings import grouped_reasons, high_gain
from gfsa.lens.readings import AttentionReading, FeatureReading, ModelReading

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gfsa.lens.report import LensReport

_SHORT = {"low-pass": "low", "high-pass": "high", "all-pass": "all", "mixed": "mix"}


def show(report: LensReport, console: Console | None) -> None:
    """Print a table and the findings for each model."""
    try:
        from rich.console import Console
    except ImportError:
        raise ImportError("tables need rich: pip install 'gfsa[cli]'") from None
    console = console or Console()
    for name, model in report.models.items():
        console.print(table(model))
        for sentence in report.findings[name]:
            console.print(f" • {sentence}", highlight=False, markup=False)
        for reason in grouped_reasons(model.skipped):
            console.print(f" • Not measured: {reason}", highlight=False, markup=False)
        console.print(_cost(model), style="dim", highlight=False)
        console.print()
    for sentence in report.headline.sentences:
        console.print(sentence, highlight=False, markup=False)


def table(model: ModelReading) -> Table:
    """One row per layer, averaged over heads."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    most = f", of {model.features[-1].most_rank:.0f} at most" if model.features else ""
    rows = Table(
        # a label in brackets is no markup
        title=escape(f"{model.name} ({model.kind})"),
        caption=(
            f"{model.samples} samples, {model.tokens} tokens; heads are averaged. rank: effective"
            f"{most}. energy: of v → after the layer. high: gain on the upper half of the "
            "frequencies, map → filter. filter: heads by Theorem 3.1"
        ),
        box=box.SIMPLE_HEAD,
        padding=0,
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("layer", "cosine", "rank", "residual", "norm", "entropy", "energy", "high"):
        rows.add_column(heading, justify="right", no_wrap=True)
    rows.add_column("filter")
    features = {reading.depth: reading for reading in model.features}
    attention = {reading.depth: reading for reading in model.attention}
    for depth in sorted(features.keys() | attention.keys()):
        rows.add_row(
            "input" if depth == 0 else str(depth),
            *_feature_cells(features.get(depth)),
            *_attention_cells(attention.get(depth)),
        )
    return rows


def _feature_cells(reading: FeatureReading | None) -> list[str]:
    if reading is None:
        return [""] * 4
    return [
        _number(reading.cosine, ".3f"),
        _number(reading.effective_rank, ".1f"),
        _number(reading.residual, ".3f"),
        _number(reading.norm, ".2f"),
    ]


def _attention_cells(reading: AttentionReading | None) -> list[str]:
    if reading is None:
        return [""] * 4
    high = ""
    if reading.spectrum is not None:
        on_map = fmean(high_gain(row) for row in reading.spectrum.map_response)
        on_filter = fmean(high_gain(row) for row in reading.spectrum.filter_response)
        high = f"{on_map:.0%}" if reading.filter is None else f"{on_map:.0%}→{on_filter:.0%}"
    verdicts = "none"
    if reading.filter is not None:
        counts = Counter(reading.verdict).most_common()
        verdicts = " ".join(f"{count} {_SHORT[word]}" for word, count in counts)
    return [
        _number(fmean(reading.entropy_share), ".2f"),
        f"{_number(fmean(reading.energy_before), '.2f')}→"
        f"{_number(fmean(reading.energy_after), '.2f')}",
        high,
        verdicts,
    ]


def _cost(model: ModelReading) -> str:
    seconds = model.seconds
    inside = ", ".join(f"{name} {seconds[name]:.1f} s" for name in seconds if name != "total")
    return f"   {seconds['total']:.1f} s in all, of which {inside}"


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"
