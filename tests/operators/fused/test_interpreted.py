"""The fused kernels in Triton's interpreter, which needs a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("file", ["interpreted.py", "interpreted_twofold.py"])
def test_in_the_interpreter(file: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", HERE / file],
        cwd=HERE.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    print(process.stdout[-5000:])
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-2000:]
    # a file that collects nothing must not pass
    assert " passed" in process.stdout
