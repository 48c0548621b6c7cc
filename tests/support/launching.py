"""Start several processes as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

WORKERS = Path(__file__).parents[1] / "scale" / "workers"
RUNNER = Path(__file__).with_name("run_script.py")


def launch(launcher: Sequence[str], script: Path, *arguments: str, timeout: float = 240) -> str:
    """Run a script by a launcher of this environment; returns what the processes print.

    One thread a process. The interpreter is not taken down after the script (``RUNNER`` says why).
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # a process that libraries abort prints where it was
    environment["PYTHONFAULTHANDLER"] = "1"
    # a worker of pytest-xdist has a rank of its own in the environment
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST")}
    program, *options = launcher
    done = subprocess.run(
        [Path(sys.executable).parent / program, *options, RUNNER, script, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    # of two processes the one that failed first is at the beginning
    assert done.returncode == 0, shortened(done.stderr)
    return done.stdout


def shortened(errors: str, characters: int = 3000) -> str:
    """The beginning and the end of what processes have printed, without faulthandler's modules."""
    lines = [line for line in errors.splitlines() if not line.startswith("Extension modules:")]
    text = "\n".join(lines)
    if len(text) <= 2 * characters:
        return text
    return f"{text[:characters]}\n…\n{text[-characters:]}"
