"""Run a script as Python would, but leave before the interpreter is taken down.

Gloo's threads let go of the tensors of the last collectives after its caller has gone on, and
DTensor's caches keep these threads alive past ``destroy_process_group``. A thread that is late, on
a busy machine, asks for an interpreter that has ended, and Python before 3.14 aborts the process:
a run that has done all its work ends with exit code -6. (The description of pytorch/pytorch#179291
has the same case for processes that do not destroy their group.)

Threads that are no daemons are waited for and ``atexit`` runs, as in any process.

python run_script.py SCRIPT ARGUMENT …
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path
from typing import Any


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
