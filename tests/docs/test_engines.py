"""docs/engines.md says what the tests of engines found."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engines import page, run
from engines.catalogue import ENGINES, ROOT, Engine


def test_page_is_made_from_the_findings() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.rebuilt(), "run make engines"


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_engines_are_described(engine: Engine) -> None:
    assert (engine.folder / "requirements.txt").is_file()
    for path in (engine.folder / name for name in engine.tests):
        assert path.is_file() or list(path.glob("test_*.py"))
    assert (ROOT / "docs" / engine.page.partition("#")[0]).is_file()


def test_every_folder_with_tests_is_an_engine() -> None:
    folders = {path.parent.name for path in Path(page.__file__).parent.glob("*/test_*.py")}
    assert folders == {engine.name for engine in ENGINES.values() if "." in engine.tests}


def test_the_page_names_the_file_of_descriptions_that_an_export_has() -> None:
    source = (ROOT / "src" / "gfsa" / "engines" / "titan" / "checkpoints.py").read_text("utf-8")
    (expected,) = re.findall(r'_DESCRIPTIONS = "(.*)"', source)
    text = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert re.findall(r"gfsa-descriptions[\w.-]*\w", text) == [expected]


def test_slow_tests_are_run_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def ran(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(run, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(subprocess, "run", ran)
    newest = ENGINES["transformers-newest"]
    assert run.examine(newest, Path("python"), ["-x"]) == {"exit": 1}
    (command,) = commands
    options, paths = command[: -len(newest.tests)], [Path(p) for p in command[-len(newest.tests) :]]
    assert options[-3:] == ["-m", "slow or not slow", "-x"]
    assert all(path.exists() for path in paths)
    # the layout of this version's cache is tested nowhere else
    (cache,) = [path for path in paths if path.name == "test_continuous_batching.py"]
    assert "mark.slow" in cache.read_text(encoding="utf-8")


def test_an_engine_that_cannot_be_built_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examined = []

    def build(engine: Engine) -> Path:
        if engine.name == "litgpt":
            raise subprocess.CalledProcessError(1, ["pip", "install"])
        return Path("python")

    def examine(engine: Engine, python: Path, extra: Any) -> dict[str, Any]:
        examined.append(engine.name)
        return {"exit": 0}

    monkeypatch.setattr(run, "build", build)
    monkeypatch.setattr(run, "examine", examine)
    assert run.main(["litgpt", "trl"]) == 1
    assert examined == ["trl"]
    assert "failed: litgpt" in capsys.readouterr().err
