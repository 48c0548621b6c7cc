"""The report of :func:`gfsa.diagnose`: numbers, sentences, a table, figures, JSON and a page."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfsa._version import __version__
from gfsa.lens.findings import findings
from gfsa.lens.headline import Headline, headline
from gfsa.lens.readings import ModelReading, model_from_plain, to_plain
from gfsa.lens.trajectory import Trajectory

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
            raise ImportError("figures need matplotlib: pip install 'gfsa[lens]'") from None
        return draw(list(self.models.values()), self.trajectories)

    def table(self, console: Console | None = None) -> None:
        """Print a table for each model, with a row for each layer."""
        from gfsa.lens.table import show

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
        except ValueError as error:
            raise ValueError(
                f"{path} is not a lens report, or damaged: expected the JSON that "
                f"report.to_json or gfsa diagnose --json wrote, got {error}"
            ) from error
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            found = plain.get("format") if isinstance(plain, dict) else type(plain).__name__
            raise ValueError(
                f"{path} is not a lens report: expected format {FORMAT!r}, got {found!r}"
            )
        try:
            return cls._from_plain(plain)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged, or was changed by hand: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def _from_plain(cls, plain: dict[str, Any]) -> LensReport:
        models = [model_from_plain(model) for model in plain["models"]]
        # reports of earlier versions have no trajectories
        paths = plain.get("trajectories", {}).items()
        return cls(
            {model.name: model for model in models},
            plain["created"],
            plain["gfsa"],
            plain["data"],
            {name: Trajectory.from_plain(path) for name, path in paths},
        )

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
