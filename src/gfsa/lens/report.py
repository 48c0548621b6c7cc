"""The report of :func:`gfsa.diagnose`: numbers, sentences, a table, figures, JSON and a page."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gfsa._version import __version__
from gfsa.lens.findings import Headline, findings, headline, passed, percent
from gfsa.lens.readings import (
    AttentionReading,
    FeatureReading,
    ModelReading,
    from_plain,
    to_plain,
)
from gfsa.lens.trajectory import Trajectory
from gfsa.plugs.sites import grouped_reasons

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table


FORMAT = "gfsa-lens/1"


@dataclass
class LensReport:
    """The readings of one model or of several, by name.

    .. code-block:: python

        report = gfsa.diagnose({"plain": a, "gfsa": b}, batch)
        report.table()                                  # in the terminal
        report.figures["similarity"].savefig("similarity.pdf")
        report.to_html("report.html")                   # one page, to be sent to a colleague
        report.models["gfsa"].features[-1].cosine       # any number
    """

    models: dict[str, ModelReading]
    created: str = ""
    version: str = __version__
    data: str = ""
    """The name of the inputs, shown on the page."""
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    """Coefficients over training by model, if they were recorded; the page draws them."""

    @property
    def headline(self) -> Headline:
        """How the models compare, and what to do next."""
        return headline(list(self.models.values()), self.trajectories)

    @property
    def findings(self) -> dict[str, list[str]]:
        """Sentences about the numbers, by model."""
        return {name: findings(model) for name, model in self.models.items()}

    @property
    def figures(self) -> dict[str, Figure]:
        """matplotlib figures by name, drawn when asked for."""
        try:
            from gfsa.lens.figures import draw
        except ImportError:
            raise ImportError("figures need matplotlib: pip install matplotlib") from None
        return draw(list(self.models.values()), self.trajectories)

    def table(self, console: Console | None = None) -> None:
        """Print a table for each model, with a row for each layer."""
        show(self, console)

    def to_plain(self) -> dict[str, Any]:
        """The report in JSON's types."""
        return {
            "format": FORMAT,
            "gfsa": self.version,
            "created": self.created,
            "data": self.data,
            "models": [to_plain(model) for model in self.models.values()],
            "trajectories": {name: path.to_plain() for name, path in self.trajectories.items()},
        }

    def to_json(self, path: str | Path) -> None:
        """Write everything; :meth:`from_json` reads it back."""
        Path(path).write_text(json.dumps(self.to_plain(), allow_nan=False), encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> LensReport:
        """A report that :meth:`to_json` wrote."""
        try:
            plain = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a lens report, or damaged: expected the JSON that "
                f"report.to_json wrote ({type(error).__name__}: {error})"
            ) from error
        found = plain.get("format") if isinstance(plain, dict) else type(plain).__name__
        if found != FORMAT:
            raise ValueError(
                f"{path} is not a lens report: expected format {FORMAT!r}, got {found!r:.40}"
            )
        try:
            models = from_plain(list[ModelReading], plain.get("models"), "models")
            # reports of earlier versions have no trajectories
            paths = from_plain(dict[str, Trajectory], plain.get("trajectories", {}), "trajectories")
            created, version, data = (
                from_plain(str, plain.get(key), key) for key in ("created", "gfsa", "data")
            )
            by_name = {model.name: model for model in models}
            if len(by_name) < len(models):
                raise ValueError("two models have the same name")
            paths = {name: path.checked() for name, path in paths.items()}
            return cls(by_name, created, version, data, paths)
        except ValueError as error:
            raise ValueError(f"{path} is damaged, or was changed by hand: {error}") from error

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained page: interactive, no network, light and dark, printable."""
        from gfsa.lens.page import render

        Path(path).write_text(render(self), encoding="utf-8")

    def __str__(self) -> str:
        lines = list(self.headline.sentences)
        for name, sentences in self.findings.items():
            lines.append(f"{name}:")
            lines += [f"  - {sentence}" for sentence in sentences]
        return "\n".join(lines)


_SHORT = {"low-pass": "low", "high-pass": "high", "all-pass": "all", "mixed": "mix"}


def show(report: LensReport, console: Console | None) -> None:
    """Print a table and the findings for each model."""
    try:
        from rich.console import Console
    except ImportError:
        raise ImportError("tables need rich: pip install rich") from None
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
            "frequencies relative to frequency 0, map → filter. filter: heads by Theorem 3.1"
        ),
        box=box.SIMPLE_HEAD,
        padding=0,
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("layer", "cosine", "rank", "residual", "norm", "entropy", "energy", "high"):
        rows.add_column(heading, justify="right", no_wrap=True)
    rows.add_column("filter")
    has_own = any(reading.own is not None for reading in model.attention)
    for heading in ("p", "A_ii", "cos(y, v)") if has_own else ():
        rows.add_column(heading, justify="right", no_wrap=True)
    features = {reading.depth: reading for reading in model.features}
    attention = {reading.depth: reading for reading in model.attention}
    for depth in sorted(features.keys() | attention.keys()):
        rows.add_row(
            "input" if depth == 0 else str(depth),
            *_feature_cells(features.get(depth)),
            *_attention_cells(attention.get(depth)),
            *(_own_cells(attention.get(depth)) if has_own else ()),
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
        high = percent(passed(reading.spectrum.map_response))
        if reading.filter is not None:
            high += f"→{percent(passed(reading.spectrum.filter_response))}"
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


def _own_cells(reading: AttentionReading | None) -> list[str]:
    if reading is None or reading.own is None:
        return [""] * 3
    own = reading.own
    return [_number(fmean(heads), ".3f") for heads in (own.part, own.weight, own.cosine)]


def _cost(model: ModelReading) -> str:
    seconds = model.seconds
    inside = ", ".join(f"{name} {seconds[name]:.1f} s" for name in seconds if name != "total")
    return f"   {seconds['total']:.1f} s in all, of which {inside}"


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"
