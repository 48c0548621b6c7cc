"""Checks the wheel and the sdist in a folder: ``python .ci/check_distributions.py dist``."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# files that are not Python, and without which the package installs but does not work
DATA = ("gfsa/py.typed", "gfsa/lens/page/lens.html", "gfsa/lens/page/lens.js")


def version_of_tree() -> str:
    text = (ROOT / "src/gfsa/_version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return version


def problems_of_texts(version: str) -> list[str]:
    """Places outside of the package that name the version."""
    found = []
    for project in ("experiments", "benchmarks"):
        if f'\nversion = "{version}"\n' not in _read(f"{project}/pyproject.toml"):
            found.append(f"{project}/pyproject.toml is not at version {version}")
    if f"\nversion: {version}\n" not in _read("CITATION.cff"):
        found.append(f"CITATION.cff is not at version {version}")
    if f"\n## [{version}] - " not in _read("CHANGELOG.md"):
        found.append(f"CHANGELOG.md has no heading '## [{version}] - DATE'")
    return found


def problems_of_wheel(path: Path, version: str) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        info = f"gfsa-{version}.dist-info"
        found = [f"{path.name} has no {name}" for name in DATA if name not in names]
        tops = {name.partition("/")[0] for name in names}
        if tops != {"gfsa", info}:
            return [*found, f"{path.name} has {sorted(tops)}, expected gfsa and {info}"]
        sources = {
            source.relative_to(ROOT / "src").as_posix()
            for source in (ROOT / "src/gfsa").rglob("*.py")
        }
        found += [f"{path.name} has no {name}" for name in sorted(sources - names)]
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        if metadata["Version"] != version or metadata["Name"] != "gfsa":
            found.append(f"{path.name} says {metadata['Name']} {metadata['Version']}")
        if f"{info}/licenses/LICENSE" not in names:
            found.append(f"{path.name} has no licence")
    return found


def problems_of_sdist(path: Path, version: str) -> list[str]:
    with tarfile.open(path) as archive:
        names = set(archive.getnames())
    wanted = ("pyproject.toml", "README.md", "LICENSE", "src/gfsa/__init__.py")
    found = [name for name in wanted if f"gfsa-{version}/{name}" not in names]
    return [f"{path.name} has no {name}" for name in found]


def problems_of_installed(wheel: Path, version: str) -> list[str]:
    """The wheel alone, without torch, imports and tells its version."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        windows = sys.platform == "win32"
        python = Path(folder) / ("Scripts/python.exe" if windows else "bin/python")
        install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel.resolve()]
        subprocess.run(install, check=True)
        program = "import gfsa; print(gfsa.__version__)"
        ran = subprocess.run(
            [python, "-I", "-c", program], capture_output=True, text=True, cwd=folder, check=False
        )
    if ran.stdout.strip() != version:
        return [f"{wheel.name} does not import: {ran.stdout}{ran.stderr}"]
    return []


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def main(folder: Path) -> None:
    version = version_of_tree()
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    names = [path.name for path in (*wheels, *sdists)]
    if names != [f"gfsa-{version}-py3-none-any.whl", f"gfsa-{version}.tar.gz"]:
        sys.exit(f"expected a wheel and an sdist of gfsa {version} in {folder}, got {names}")
    found = problems_of_texts(version)
    found += problems_of_wheel(wheels[0], version)
    found += problems_of_sdist(sdists[0], version)
    found += problems_of_installed(wheels[0], version)
    if found:
        sys.exit("\n".join(found))
    print(f"gfsa {version}: wheel and sdist are complete, and the wheel imports")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
