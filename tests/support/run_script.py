"""Run a script as Python would, and leave before the interpreter is taken down.

Gloo's threads let go of the tensors of the last collectives after its caller has gone on, and
DTensor's caches keep these threads alive past ``destroy_process_group``. If a thread is late, on a
busy machine, it asks for an interpreter that has ended, and Python before 3.14 aborts the process
(pytorch/pytorch#179291): a run that has done all its work ends with exit code -6.

python run_script.py SCRIPT ARGUMENT …
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    # an error goes on as usual: this line is reached by a script that ran to its end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
