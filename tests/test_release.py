"""What ``make release`` checks before anything is published."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import gfsa

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    path = ROOT / ".ci" / "check_distributions.py"
    spec = importlib.util.spec_from_file_location("check_distributions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_names_the_same_version(checks: ModuleType) -> None:
    assert checks.version_of_tree() == gfsa.__version__
    assert checks.problems_of_texts(gfsa.__version__) == []


def test_another_version_is_found_in_every_file(checks: ModuleType) -> None:
    found = " ".join(checks.problems_of_texts("9.9.9"))
    for name in ("experiments", "benchmarks", "CITATION.cff", "CHANGELOG.md"):
        assert name in found


def write_wheel(path: Path, leave_out: str = "") -> None:
    info = f"gfsa-{gfsa.__version__}.dist-info"
    sources = [p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src/gfsa").rglob("*.py")]
    pages = [p.relative_to(ROOT / "src").as_posix() for p in ROOT.glob("src/gfsa/lens/page/*.*")]
    names = {*sources, *pages, "gfsa/py.typed", f"{info}/licenses/LICENSE"} - {leave_out}
    with zipfile.ZipFile(path, "w") as wheel:
        for name in sorted(names):
            wheel.writestr(name, "")
        wheel.writestr(f"{info}/METADATA", f"Name: gfsa\nVersion: {gfsa.__version__}\n")


@pytest.mark.parametrize(
    "leave_out",
    ["gfsa/py.typed", "gfsa/cli.py", "gfsa/lens/page/lens.html"],
)
def test_a_wheel_without_a_file_is_found(
    checks: ModuleType, tmp_path: Path, leave_out: str
) -> None:
    wheel = tmp_path / "gfsa.whl"
    write_wheel(wheel)
    assert checks.problems_of_wheel(wheel, gfsa.__version__) == []
    write_wheel(wheel, leave_out)
    assert checks.problems_of_wheel(wheel, gfsa.__version__) == [f"gfsa.whl has no {leave_out}"]


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_changes_that_are_not_committed_are_refused(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    ran = subprocess.run(
        ["make", "release"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert "commit or stash these changes first" in ran.stderr
    assert not (tmp_path / ".venv-release").exists()
