"""The coefficients of a model's filters over training: recorded step by step, to CSV and back."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from gfsa.lens.readings import Numbers, csv_cell, from_plain, printable, to_plain
from gfsa.lens.watch import attention_modules
from gfsa.plugs.sites import filters_of

_FIRST_COLUMNS = ["step", "layer", "name", "head"]


@dataclass
class LayerTrajectory:
    """The coefficients of one layer's filter at every recorded step."""

    depth: int
    """The position of the layer among the model's attention layers, counted from 1."""
    name: str
    coefficients: list[list[Numbers]] = field(default_factory=list)
    """steps × heads × (degree+1)."""


@dataclass
class Trajectory:
    """The coefficients of every filter that learns, at several steps of training.

    .. code-block:: python

        trajectory = Trajectory()
        for step, batch in enumerate(loader):
            if step % 100 == 0:
                trajectory.record(model, step)
            ...
        trajectory.to_csv("coefficients.csv")

    A filter without parameters that require a gradient is left out: its coefficients stay.
    """

    steps: list[int] = field(default_factory=list)
    layers: list[LayerTrajectory] = field(default_factory=list)

    def __post_init__(self) -> None:
        for layer in self.layers:
            if len(layer.coefficients) != len(self.steps):
                raise ValueError(
                    f"{layer.name} has {len(layer.coefficients)} of {len(self.steps)} steps"
                )
            heads = {len(rows) for rows in layer.coefficients}
            widths = {len(row) for rows in layer.coefficients for row in rows}
            if len(heads) > 1 or len(widths) > 1 or 0 in heads | widths:
                raise ValueError(f"{layer.name}: expected as many heads and coefficients each step")

    def record(self, model: nn.Module, step: int) -> None:
        """Add the coefficients of ``model`` after ``step`` steps.

        Where a model is sharded over processes, every process has to call this.
        """
        if self.steps and step <= self.steps[-1]:
            raise ValueError(
                f"expected a step after {self.steps[-1]}, which is recorded already, got {step}"
            )
        filters = {
            name: filter
            for name, filter in filters_of(model).items()
            if filter.is_polynomial and any(p.requires_grad for p in filter.parameters())
        }
        if not self.steps and filters:
            depths = {name: at for at, name in enumerate(attention_modules(model), start=1)}
            self.layers = [LayerTrajectory(depths[name], name) for name in filters]
        recorded = [layer.name for layer in self.layers]
        if recorded != list(filters):
            raise ValueError(
                f"the model's filters have changed: {', '.join(recorded) or 'none'} were recorded, "
                f"the model has {', '.join(filters) or 'none'}; record into a new Trajectory"
            )
        self.steps.append(step)
        for layer in self.layers:
            values = filters[layer.name].coefficients().detach()
            layer.coefficients.append(values.double().cpu().tolist())

    @property
    def powers(self) -> int:
        """The number of coefficients of the filter that has most."""
        rows = [row for layer in self.layers for heads in layer.coefficients for row in heads]
        return max(map(len, rows), default=0)

    def to_plain(self) -> dict[str, Any]:
        """The trajectory in JSON's types; floats have six digits."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Trajectory:
        """The inverse of :meth:`to_plain`."""
        found: Trajectory = from_plain(cls, plain, "trajectory")
        return found

    def to_text(self) -> str:
        """CSV: a line per step, layer and head with ``c0``, ``c1``, …"""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*_FIRST_COLUMNS, *(f"c{power}" for power in range(self.powers))])
        for at, step in enumerate(self.steps):
            for layer in self.layers:
                for head, row in enumerate(layer.coefficients[at], start=1):
                    values = [f"{value:.6g}" for value in row]
                    writer.writerow([step, layer.depth, csv_cell(layer.name), head, *values])
        return text.getvalue()

    def to_csv(self, path: str | Path) -> None:
        """Write :meth:`to_text`; :meth:`from_csv` reads it back, rounded to six digits."""
        Path(path).write_text(self.to_text(), encoding="utf-8")

    @classmethod
    def from_csv(cls, path: str | Path) -> Trajectory:
        """A trajectory that :meth:`to_csv` wrote, such as ``coefficients.csv`` of a run folder."""
        with open(path, encoding="utf-8", newline="") as file:
            try:
                head, *lines = list(csv.reader(file)) or [[]]
            except (ValueError, csv.Error) as error:
                raise ValueError(
                    f"{path} has no coefficients over training: it is not a CSV file ({error})"
                ) from error
        powers = [f"c{power}" for power in range(len(head) - len(_FIRST_COLUMNS))]
        if not powers or head != [*_FIRST_COLUMNS, *powers]:
            raise ValueError(
                f"{path} has no coefficients over training: expected the columns "
                f"{', '.join(_FIRST_COLUMNS)}, c0, c1, …, got {', '.join(head) or 'none'}"
            )
        if not lines:
            raise ValueError(f"{path} has no line below its heading: no step was recorded")
        steps: dict[int, None] = {}
        layers: dict[str, LayerTrajectory] = {}
        try:
            # by step, layer and head, as to_text writes them
            for at, depth, layer_name, number, *cells in lines:
                step, head_number, name = int(at), int(number), printable(layer_name)
                steps.setdefault(step)
                layer = layers.setdefault(name, LayerTrajectory(int(depth), name))
                if head_number == 1:
                    layer.coefficients.append([])
                heads = layer.coefficients[-1]
                if head_number != len(heads) + 1:
                    raise ValueError(f"step {step}, {name}: head {head_number} is out of order")
                # filters of a lower degree end with empty cells, in a spreadsheet's copy too
                while cells and not cells[-1]:
                    cells.pop()
                heads.append([float(cell) for cell in cells])
            return cls(list(steps), list(layers.values()))
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} is damaged, or was changed by hand: {error}") from error
