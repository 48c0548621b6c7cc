"""docs/engines.md says what the tests of engines found, and what ``make engines`` runs exists."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from engines import run


def test_page_is_made_from_the_findings() -> None:
    assert run.PAGE.read_text(encoding="utf-8") == run.rebuilt(), "run make engines"


def test_tests_and_pages_of_every_engine_exist() -> None:
    for engine in run.ENGINES.values():
        for path in engine.paths:
            assert path.is_file() or list(path.glob("test_*.py")), path
        assert (run.ROOT / "docs" / engine.page.partition("#")[0]).is_file()
    named = {path.resolve() for engine in run.ENGINES.values() for path in engine.paths}
    files = run.HERE.rglob("test_*.py")
    assert not [path for path in files if not {path, path.parent} & named]


def test_an_engine_that_cannot_be_built_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examined = []

    def build(engine: run.Engine) -> Path:
        if engine.name == "litgpt":
            raise subprocess.CalledProcessError(1, ["pip", "install"])
        return Path("python")

    def examine(engine: run.Engine, python: Path, extra: Any) -> dict[str, Any]:
        examined.append(engine.name)
        return {"exit": 0}

    monkeypatch.setattr(run, "build", build)
    monkeypatch.setattr(run, "examine", examine)
    assert run.main(["litgpt", "trl"]) == 1
    assert examined == ["trl"]
    assert "failed: litgpt" in capsys.readouterr().err
