"""Start several processes as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORKERS = Path(__file__).parents[1] / "scale" / "workers"


def launch(*command: str, timeout: float = 240) -> str:
    """Run a launcher of this environment as a user would type it; returns what it prints.

    One thread a process.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # a process that libraries abort prints where it was
    environment["PYTHONFAULTHANDLER"] = "1"
    # a worker of pytest-xdist has a rank of its own in the environment
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    # of two processes the one that failed first is at the beginning
    assert done.returncode == 0, f"{done.stderr[:4000]}\n…\n{done.stderr[-4000:]}"
    return done.stdout
