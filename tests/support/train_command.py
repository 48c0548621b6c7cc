"""The command ``gfsa train``, called as from a shell; of plain alone by default."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from gfsa.cli import build


def train(tmp_path: Path, *words: str) -> tuple[int, str]:
    if words and not {"--method", "--plan", "--list"} & set(words):
        # one run where a test is not about methods
        words += ("--method", "plain")
    places = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    result = CliRunner().invoke(
        build(), ["train", *words, *places, "--device", "cpu"], env={"COLUMNS": "300"}
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output
