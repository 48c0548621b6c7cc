"""A launched script that fails is noticed; how the interpreter is taken down after it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.launching import launch, shortened


def write(folder: Path, *lines: str) -> Path:
    script = folder / "script.py"
    script.write_text("\n".join(lines))
    return script


def test_a_script_sees_its_arguments_and_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = 'next door'")
    script = write(
        tmp_path,
        "import sys, neighbour",
        "if __name__ == '__main__':",
        "    print(neighbour.NAME, sys.argv)",
    )
    assert launch(["python"], script, "--steps=4") == f"next door {[str(script), '--steps=4']}\n"


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("raise ValueError('no such file')", "ValueError: no such file"),
        ("sys.exit('wrong option')", "wrong option"),
        ("os.abort()", "Fatal Python error: Aborted"),
    ],
)
def test_a_script_that_fails(last: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said):
        launch(["python"], write(tmp_path, "import os, sys", last))


def test_the_end_of_the_interpreter_is_not_reached(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import atexit, os, threading",
        "class Aborts:",
        "    def __del__(self):",
        "        os.abort()",
        "late = Aborts()",
        "atexit.register(print, 'atexit')",
        "threading.Timer(0.2, print, ['thread']).start()",
        "print('done')",
    )
    assert launch(["python"], script) == "done\nthread\natexit\n"


def test_what_is_shown_of_errors() -> None:
    modules = f"Extension modules: {'numpy.core, ' * 1000}"
    assert shortened(f"Aborted\n{modules}\nexit code -6") == "Aborted\nexit code -6"
    assert shortened("abcdefghij", characters=2) == "ab\n…\nij"
