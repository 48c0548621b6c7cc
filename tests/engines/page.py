"""docs/engines.md: a table of engines, from ``findings.json`` of each, which it links to."""

from __future__ import annotations

import json
from typing import Any

from engines.catalogue import ENGINES, ROOT, Engine

PAGE = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- make engines: begin -->", "<!-- make engines: end -->"


def table() -> str:
    """The generated part of the page."""
    lines = [
        "| engine | version | start | tests | time | cache memory |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for engine in ENGINES.values():
        if not engine.findings.exists():
            lines.append(f"| {_title(engine)} | – | {engine.start} | not run | – | – |")
            continue
        found = json.loads(engine.findings.read_text(encoding="utf-8"))
        time, memory = (_cost(found, kind) for kind in ("time", "memory"))
        skipped = f", {found['skipped']} skipped" if found["skipped"] else ""
        passed = f"{found['tests'] - found['skipped']} passed{skipped}"
        tests = f"[{passed}](../{engine.findings.relative_to(ROOT).as_posix()})"
        cells = [_title(engine), found["version"], engine.start, tests, time, memory]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def rebuilt() -> str:
    """The page with its generated part made anew."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


def write() -> None:
    """Write the page."""
    PAGE.write_text(rebuilt(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


def _title(engine: Engine) -> str:
    return f"[{engine.title}]({engine.page})"


def _cost(found: dict[str, Any], kind: str) -> str:
    return "; ".join(row["result"] for row in found["findings"] if row["check"] == kind) or "–"
