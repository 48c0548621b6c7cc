"""Start several processes as a user would.

As a script, ``python launching.py SCRIPT ARGUMENT …``, it runs a script as Python would, but leaves
before the interpreter is taken down. Gloo's threads let go of the tensors of the last collectives
after its caller has gone on, and DTensor's caches keep these threads alive past
``destroy_process_group``. A thread that is late, on a busy machine, asks for an interpreter that
has ended, and Python before 3.14 aborts the process: a run that has done all its work ends with
exit code -6. (The description of pytorch/pytorch#179291 has the same case for processes that do not
destroy their group.)
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parents[1] / "scale" / "workers"


def launch(launcher: Sequence[str], script: Path, *arguments: str, timeout: float = 240) -> str:
    """Run a script by a launcher of this environment; returns what the processes print.

    One thread a process. The interpreter is not taken down after the script (the module says why).
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # a process that libraries abort prints where it was
    environment["PYTHONFAULTHANDLER"] = "1"
    # a worker of pytest-xdist has a rank of its own in the environment
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST")}
    program, *options = launcher
    done = subprocess.run(
        [Path(sys.executable).parent / program, *options, __file__, script, *arguments],
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


def main() -> None:
    # the script's variables: they are not deleted before it ends, as those of a script are not
    left: list[dict[str, Any]] = []

    def leave() -> None:
        if left:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    # registered first, so it runs after all that the script registers
    atexit.register(leave)
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    sys.path[0] = str(Path(script).parent)
    # an error goes on as usual, and leaves nothing here
    left.append(runpy.run_path(script, run_name="__main__"))


if __name__ == "__main__":
    main()
