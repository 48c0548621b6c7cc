"""Rows of docs/supported.md, as the tests find them."""

from __future__ import annotations

from dataclasses import dataclass

from gfsa.plugs import PlugReport

TABLE = "| library | model | how | heads of the plugged layers | left alone | at init |"
HEADER = f"""\
# What can be plugged

Look up your model here, or ask `gfsa info MODEL`. How to use it is on the pages for
[transformers](transformers.md) and [timm](timm.md).

Each row is the result of a test with random weights. Unless the row says *refused*, the test
showed: outputs as before at init, equality with the dense formula Σ c_k A^k in float64 up
to 1e-10 (2e-6 for transformers models that compute in float32 inside), gradients to every filter,
copies and pickles with filters of their own (where the model itself can be copied), a save and
load round trip, and classes, keys and outputs as before after `gfsa.unplug`.
`pytest tests/plugs --write-supported` writes the rows.

*At init* is the largest difference to the model before plugging. *How*: an adapter repeats the
module's forward with the filter in it; the tracer follows the module's own forward. The tracer is
automatic for known classes and for transformers models outside its attention interface; for others
pass `unknown="trace"`. Models of transformers' attention interface have a row for each
`attn_implementation` that was tested, `eager` or `sdpa`.

{TABLE}
|---|---|---|---|---|---|"""


@dataclass(frozen=True, order=True)
class Row:
    library: str
    model: str
    line: str


class Supported:
    """Collects rows while the file is written, checks them otherwise."""

    def __init__(self, rows: list[Row], written: str | None) -> None:
        self.rows = rows
        self.written = written

    def __call__(
        self, library: str, model: str, report: PlugReport, at_init: str = "0", how: str = ""
    ) -> None:
        hows = "; ".join(dict.fromkeys(report.how.values()))
        heads = " ".join(str(n) for n in report.plugged.values())
        self._state(library, model, how or hows, heads, _reasons(report), at_init)

    def refused(self, library: str, model: str, why: str) -> None:
        """A model of which nothing can be plugged."""
        self._state(library, model, "refused", "", why, "")

    def _state(self, library: str, model: str, *cells: str) -> None:
        line = "| " + " | ".join((library, model, *cells)) + " |"
        if self.written is None:
            self.rows.append(Row(library, model, line))
        else:
            assert line in self.written.splitlines(), (
                f"docs/supported.md does not have this row:\n{line}\n"
                "pytest tests/plugs --write-supported writes it anew"
            )


def _reasons(report: PlugReport) -> str:
    return "; ".join(dict.fromkeys(report.skipped.values()))
