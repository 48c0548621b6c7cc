"""The census in docs/supported.md: a table between two markers, written by ``make census``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from census.verdict import Finding, Verdict, without_folders

PAGE = Path(__file__).parents[2] / "docs" / "supported.md"
BEGIN, END = "<!-- census: begin -->", "<!-- census: end -->"
_LONGEST = 160

_ABOUT = """\
## Census

`make census` builds a tiny random model of every model type of transformers {transformers} and of
every model file of timm {timm} with attention, plugs it twice, and compares it in float64 with the
same model in which A is replaced by H = c0·I + c1·A + c2·A², computed without gfsa: outputs for 1,
2 and 4 samples (4 heads) of two lengths on one plugged instance, gradients of the filters, the
weights and the inputs, decoding with a cache, save and load, unplug. It also looks for attention
that the report leaves out, for cross-attention with a filter, and for maps whose rows and columns
are in different orders.

*By default* is `gfsa.plug(model)`; *traced* is `unknown="trace"` with the tracer in place of every
adapter, where that is another thing. A model is *right*, or *refused* with a reason; everything
else is a failure and ends the run with an error. *2 of 4*: the inputs of the census reach two of
four plugged layers (a vision tower without an image, say).

{summary}
"""


def lines(verdict: Verdict) -> list[str]:
    """What the page says of one model."""
    default = verdict.findings["default"]
    if default.status == "not built":
        return [f"- {verdict.name}: {_short(default.reason)}"]
    return [_row(verdict)]


def _row(verdict: Verdict) -> str:
    default = verdict.findings["default"]
    traced = verdict.findings.get("traced")
    cells = (
        verdict.name,
        verdict.model,
        _cell(default),
        "as by default" if traced is None else _cell(traced),
        _short(default.generation),
    )
    return "| " + " | ".join(cells) + " |"


def _cell(finding: Finding) -> str:
    if finding.status == "right":
        reached = "" if finding.reached == finding.plugged else f", {finding.reached} of "
        reached += "" if not reached else str(finding.plugged)
        return f"right{reached}" + (f"; {_short(finding.reason)}" if finding.reason else "")
    if finding.status == "refused":
        return f"refused: {_short(finding.reason)}"
    return f"**{finding.status}**: {_short(finding.reason)}"


def _short(text: str) -> str:
    """One cell's worth of a reason: without the error's type, and without what to do about it."""
    text = without_folders(text)
    text = text.replace("|", "/").replace("ValueError: ", "").replace("TraceError: ", "")
    for end in (". gfsa.unplug", "; with unknown=", " gfsa.register_adapter"):
        text = text.partition(end)[0]
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def section(verdicts: Iterable[Verdict], versions: dict[str, str]) -> str:
    """All that stands between the markers."""
    verdicts = list(verdicts)
    built = [v for v in verdicts if v.findings["default"].status != "not built"]
    missing = [v for v in verdicts if v.findings["default"].status == "not built"]
    counts = {
        mode: Counter(v.findings[mode].status for v in built if mode in v.findings)
        for mode in ("default", "traced")
    }
    summary = "; ".join(
        f"{mode}: " + ", ".join(f"{n} {status}" for status, n in counts[mode].most_common())
        for mode in counts
    )
    text = [BEGIN, "", _ABOUT.format(**versions, summary=f"{len(built)} models; {summary}.")]
    text += ["| type | class | by default | traced | cached decoding |", "|---|---|---|---|---|"]
    text += [line for v in built for line in lines(v)]
    text += ["", "No tiny config, or no inputs, are known for these:", ""]
    text += [line for v in missing for line in lines(v)]
    return "\n".join([*text, "", END]) + "\n"


def write(text: str, page: Path = PAGE) -> None:
    """Put the section into the page, in place of the one that is there."""
    old = page.read_text(encoding="utf-8")
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2].lstrip("\n")
    page.write_text(f"{before.rstrip()}\n\n{text}{after}", encoding="utf-8")


def written_rows(page: Path = PAGE) -> set[str]:
    """The lines of the section as they stand in the page."""
    text = page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return set(text.splitlines())


def written_names(page: Path = PAGE) -> set[str]:
    """The entries of which the page says something."""
    found = set()
    for line in written_rows(page):
        if line.startswith(("| transformers:", "| timm:")):
            found.add(line.split("|")[1].strip())
        elif line.startswith(("- transformers:", "- timm:")):
            library, _, rest = line.removeprefix("- ").partition(":")
            found.add(f"{library}:{rest.partition(':')[0]}")
    return found
