"""A sample of the census agrees with docs/supported.md; ``make census`` runs all of it."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import gfsa
from census import page
from census.catalogue import entries
from census.run import run

SIZE = 20
SEED = "GFSA_CENSUS_SEED"
"""The environment variable that chooses another sample."""


def sample(names: Iterable[str], size: int) -> list[str]:
    """The same names for one commit, others for another."""
    chosen = seed()

    def rank(name: str) -> str:
        return hashlib.sha256(f"{chosen} {name}".encode()).hexdigest()

    return sorted(sorted(names, key=rank)[:size])


def seed() -> str:
    """The environment's seed, or else the commit, or else the version."""
    if given := os.environ.get(SEED):
        return given
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return gfsa.__version__
    return found.stdout.strip() or gfsa.__version__


def test_a_sample_agrees_with_the_page() -> None:
    written = page.written_rows()
    names = sample([entry.name for entry in entries()], SIZE)
    verdicts = run(names, processes=1)
    different = [line for v in verdicts for line in page.lines(v) if line not in written]
    assert not different, (
        "docs/supported.md does not have these rows (make census writes it anew; "
        f"{SEED}={seed()} chooses this sample again):\n" + "\n".join(different)
    )


def test_the_page_has_every_entry() -> None:
    written = page.written_names()
    assert written == {entry.name for entry in entries()}
