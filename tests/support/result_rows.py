"""Rows of runs that never ran."""

from collections.abc import Callable, Sequence
from typing import Any

from gfsa_experiments.results.families import Family
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


def rows_of_family(
    family: Family,
    tests: dict[str, Sequence[float]],
    others: Callable[[str, int], dict[str, Any]] = lambda line, at: {},
) -> list[Row]:
    """A row for each run of a family, in the order of its comparisons.

    Args:
        tests: of each line, a result for each seed.
        others: of a line and the place of a seed, what else its row says.
    """
    recorded = {}
    for comparison in family.comparisons:
        for line, keys in comparison.keys.items():
            for at, key in enumerate(keys):
                values: dict[str, Any] = {
                    "metric": "accuracy",
                    "higher_is_better": True,
                    "test": tests[line][at],
                    "epochs": 3.0,
                    "commit": "abc1234",
                    "date": "2026-11-16T01:00:00+00:00",
                }
                recorded[key] = Row(**key._asdict(), **(values | others(line, at)))
    return list(recorded.values())
