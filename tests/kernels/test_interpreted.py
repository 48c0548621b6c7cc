"""The fused kernels in Triton's interpreter, which needs processes of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("interpreted*.py"))
# a process takes seconds to start; the files of each take about equally long
PROCESSES = {"decode": FILES[:1], "layers": FILES[1:3], "masks and routes": FILES[3:]}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("files", PROCESSES.values(), ids=PROCESSES)
def test_in_the_interpreter(files: list[Path]) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    print(process.stdout[-5000:])
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-2000:]
    # a file that collects nothing must not pass
    assert all(file.name in process.stdout for file in files)
