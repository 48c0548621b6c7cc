"""What a row says of where it was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import gfsa
from gfsa.environment import commit


def test_edited_code_is_told_and_a_grown_table_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GFSA_COMMIT", raising=False)
    code, table = tmp_path / "src" / "gfsa" / "__init__.py", tmp_path / "results" / "bench.csv"
    recipe = tmp_path / "experiments" / "src" / "recipe.py"
    for file in (code, table, recipe):
        file.parent.mkdir(parents=True)
        file.write_text("one\n")
    monkeypatch.setattr(gfsa, "__file__", str(code))
    assert commit() == ""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        ran = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)
        return ran.stdout.decode().strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    name = git("rev-parse", "--short", "HEAD")
    table.write_text("two\n")
    assert commit() == name
    for edited in (code, recipe):
        edited.write_text("two\n")
        assert commit() == f"{name}-dirty"
        edited.write_text("one\n")
    assert commit() == name
