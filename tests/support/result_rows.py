"""Rows of runs that never ran."""

from typing import Any

from gfsa_experiments.runs.row import Row


def row(method: str = "plain", seed: int = 0, test: float = 50.0, **others: Any) -> Row:
    """A row of CoLA unless told otherwise."""
    values: dict[str, Any] = {
        "recipe": "glue",
        "task": "cola minilm",
        "options": "",
        "settings": "",
        "metric": "matthews",
        "higher_is_better": True,
        "parameters": 22_700_000,
        "epochs": 5.0,
        "steps": 100,
        "device": "NVIDIA H200",
        "precision": "bf16",
        "date": "2026-11-15T07:00:00+00:00",
        "command": f"gfsa train glue --method {method}",
    }
    return Row(method=method, seed=seed, test=test, **(values | others))


def rows(method: str, tests: list[float], **others: Any) -> list[Row]:
    """One row a seed, from seed 0."""
    return [row(method, seed, test, **others) for seed, test in enumerate(tests)]
