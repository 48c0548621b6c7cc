"""The commands under a table."""

from __future__ import annotations

from gfsa_experiments.results.page_sections import commands_of
from support.result_rows import row


def test_runs_that_differ_in_their_seed_alone_are_one_command() -> None:
    def made(method: str, seed: int) -> str:
        return f"gfsa train glue --method {method} --seeds {seed} --set lr=1"

    rows = [row(m, seed=s, command=made(m, s)) for m in ("plain", "gfsa") for s in (1, 0, 11)]
    assert commands_of([*rows, row("plain", seed=3, command="")]) == [
        "gfsa train glue --method plain --seeds 0,1,11 --set lr=1",
        "gfsa train glue --method gfsa --seeds 0,1,11 --set lr=1",
    ]
