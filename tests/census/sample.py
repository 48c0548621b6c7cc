"""A part of the census that differs from commit to commit, for tests that run often."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import gfsa

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
