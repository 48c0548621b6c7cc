"""The report of :func:`gfsa.diagnose`: numbers, sentences, a table, figures, JSON and a page."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfsa._version import __version__
from gfsa.lens.readings import ModelReading, from_plain, to_plain
from gfsa.lens.sentences import Headline, caption, findings, headline, rows
from gfsa.plugs.sites import grouped_reasons

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

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

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("a report has the readings of at least one model, got none")

    @property
    def headline(self) -> Headline:
        """How the models compare, and what to do next."""
        return headline(list(self.models.values()))

    @property
    def findings(self) -> dict[str, list[str]]:
        """Sentences about the numbers, by model."""
        return {name: findings(model) for name, model in self.models.items()}

    @property
    def figures(self) -> dict[str, Figure]:
        """matplotlib figures of the readings by name, drawn when asked for."""
        try:
            from gfsa.lens.figures import draw
        except ImportError:
            raise ImportError("figures need matplotlib: pip install matplotlib") from None
        return draw(list(self.models.values()))

    def table(self, console: Console | None = None) -> None:
        """Print a table and the findings for each model, then the headline."""
        try:
            from rich import box
            from rich.console import Console
            from rich.markup import escape
            from rich.table import Table
        except ImportError:
            raise ImportError("tables need rich: pip install rich") from None
        console = console or Console()
        left: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
        for name, model in self.models.items():
            headings, *layers = rows(model)
            # a label in brackets is no markup
            title = escape(f"{model.name} ({model.kind})")
            table = Table(
                title=title, caption=caption(model), box=box.SIMPLE_HEAD, padding=0, **left
            )
            for heading in headings:
                is_text = heading == "filter"
                table.add_column(
                    heading, justify="left" if is_text else "right", no_wrap=not is_text
                )
            for layer in layers:
                table.add_row(*layer)
            console.print(table)
            notes = [f"Not measured: {reason}" for reason in grouped_reasons(model.skipped)]
            for sentence in self.findings[name] + notes:
                console.print(f" • {sentence}", highlight=False, markup=False)
            console.print()
        for sentence in self.headline.sentences:
            console.print(sentence, highlight=False, markup=False)

    def to_plain(self) -> dict[str, Any]:
        """The report in JSON's types."""
        return {
            "format": FORMAT,
            "gfsa": self.version,
            "created": self.created,
            "data": self.data,
            "models": to_plain(list(self.models.values())),
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
        if plain.get("trajectories"):
            warnings.warn(
                f"{path} has coefficients over training ('trajectories'), which are not shown",
                stacklevel=2,
            )
        try:
            readings = from_plain(list[ModelReading], plain.get("models"), "models")
            models = {reading.name: reading for reading in readings}
            if len(models) < len(readings):
                raise ValueError("two models have the same name")
            texts = (from_plain(str, plain.get(key), key) for key in ("created", "gfsa", "data"))
            return cls(models, *texts)
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
