"""The fused kernels in Triton's interpreter, which needs a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("file", sorted(HERE.glob("interpreted*.py")), ids=lambda file: file.stem)
def test_in_the_interpreter(file: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    print(process.stdout[-5000:])
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-2000:]
    # a file that collects nothing must not pass
    assert " passed" in process.stdout
