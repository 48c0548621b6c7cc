"""The lines of all tables as one CSV file, with unrounded numbers in the metric's own unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from gfsa.lens.readings import csv_cell
from gfsa_experiments.results.notes import notes_of
from gfsa_experiments.results.paper import counterpart
from gfsa_experiments.results.tables import Line, ResultTable


def write_csv(path: Path, tables: Sequence[ResultTable], paper: bool) -> None:
    """One line per method with its options; with ``paper`` also the paper's differences."""
    records = [
        {
            name: csv_cell(value) if isinstance(value, str) else value
            for name, value in _record(table, line, paper).items()
        }
        for table in tables
        for line in table.lines
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(records, dtype=object).to_csv(path, index=False, lineterminator="\r\n")


def _record(table: ResultTable, line: Line, paper: bool) -> dict[str, Any]:
    found, second = line.to_plain, line.to_degree1
    test = None if found is None else found.test
    record: dict[str, Any] = {
        "recipe": table.recipe,
        "task": table.task,
        "settings": table.settings,
        "data": " ".join(sorted(set(line.rows.data) - {""})),
        "metric": table.metric,
        "higher_is_better": table.higher_is_better,
        "method": line.method,
        "options": line.options,
        "seeds": len(line.rows),
        "failed": len(line.failed),
        "mean": line.mean,
        "std": line.std,
        "valid": line.valid,
        "paired_seeds": len(test.seeds) if test else 0,
        "difference": test and test.mean,
        "low": test and test.low,
        "high": test and test.high,
        "p": test and test.p,
        "p_holm": line.adjusted_p,
        "seeds_better": test and test.seeds_better,
        "verdict": test and test.reading,
        "difference_on_valid": found and found.valid and found.valid.mean,
        "one_commit": found and found.one_commit,
        "difference_to_degree1": second and second.test.mean,
        "added": max(line.added, default=None),
        "moved": line.moved,
        "coefficients": " ".join(f"{c:.6g}" for c in line.coefficients or ()),
        "time_ratio": " ".join(f"{time:.4g}" for time in line.times),
        "memory_ratio": " ".join(f"{memory:.4g}" for memory in line.memories),
        "gpu_seconds": line.gpu_seconds,
        "notes": " ".join(notes_of(table)),
    }
    if paper:
        record["paper_not_measured"] = _paper(table, line)
    return record


def _paper(table: ResultTable, line: Line) -> str:
    match = counterpart(table.recipe, table.task, [line.options])
    if match is None:
        return ""
    return "; ".join(
        f"{found.difference:+.6g} {found.figure.metric} ({match.data}, {found.figure.backbone}, "
        f"Table {found.figure.table})"
        for found in match.differences(line.method, line.options)
    )
