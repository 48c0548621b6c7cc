"""Run the tests of engines, each in an environment of its own: ``make engines``.

From the folder ``tests``: ``python -m engines.run [NAME …] [--write]``. ``engines.toml`` describes
the engines; what filters cost there is a property of the test suite, ``time`` or ``memory``.
``--write`` writes an engine's row of the table in docs/engines.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-engines"
PAGE = ROOT / "docs" / "engines.md"
_COSTS = ("time", "memory")
_VERSION = "from importlib.metadata import version; import sys; print(version(sys.argv[1]))"


@dataclass(frozen=True)
class Engine:
    """An entry of ``engines.toml``, which says what the fields are."""

    name: str
    title: str
    package: str
    start: str
    page: str
    tests: list[str]
    requirements: list[str]
    remove: tuple[str, ...] = ()

    @property
    def link(self) -> str:
        return f"[{self.title}]({self.page})"

    @property
    def paths(self) -> list[Path]:
        return [HERE / path for path in self.tests]


_CONTENT = tomllib.loads((HERE / "engines.toml").read_text(encoding="utf-8"))
_SHARED = _CONTENT.pop("shared")
ENGINES = {name: Engine(name, **entry) for name, entry in _CONTENT.items()}


def build(engine: Engine) -> Path:
    """The Python of an engine's environment, which is built where it is missing or outdated."""
    folder = ENVIRONMENTS / engine.name
    python, done = folder / "bin" / "python", folder / ".done"
    requirements = [*engine.requirements, *_SHARED]
    wanted = json.dumps([requirements, engine.remove])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        # its entry points may have changed
        subprocess.run([*pip, "install", "-q", "--no-deps", "-e", str(ROOT)], check=True)
        return python
    print(f"{engine.title}: building {folder.relative_to(ROOT)}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    subprocess.run([*pip, "install", "-q", *requirements, "-e", str(ROOT)], check=True)
    if engine.remove:
        subprocess.run([*pip, "uninstall", "-q", "-y", *engine.remove], check=True)
    done.write_text(wanted, encoding="utf-8")
    return python


def examine(engine: Engine, python: Path, extra: Sequence[str]) -> tuple[int, str]:
    """Run an engine's tests; their exit status, and the engine's row of the table."""
    report = ENVIRONMENTS / f"{engine.name}.xml"
    report.unlink(missing_ok=True)
    # an engine's console scripts belong to its environment
    programs = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # tests that make test leaves out for their time have no other environment to run in
    command += ["-m", "slow or not slow", *extra, *map(str, engine.paths)]
    outcome = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": programs})
    if not report.exists():
        # pytest ended before the first test; it has said why
        return outcome.returncode or 1, ""
    version = subprocess.run(
        [str(python), "-c", _VERSION, engine.package], capture_output=True, text=True, check=True
    )
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    tests, skipped = (int(suite.get(key, 0)) for key in ("tests", "skipped"))
    passed = f"{tests - skipped} passed" + (f", {skipped} skipped" if skipped else "")
    found = [(entry.get("name"), entry.get("value", "")) for entry in suite.iter("property")]
    costs = ["; ".join(value for name, value in found if name == kind) for kind in _COSTS]
    cells = [engine.link, version.stdout.strip(), engine.start, passed, *(c or "–" for c in costs)]
    return outcome.returncode, f"| {' | '.join(cells)} |"


def write(engine: Engine, row: str) -> None:
    """Replace the engine's row of the table."""
    page = PAGE.read_text(encoding="utf-8")
    old = re.compile(rf"^\| {re.escape(engine.link)} \|.*$", re.MULTILINE)
    if len(old.findall(page)) != 1:
        raise ValueError(f"expected one row of {engine.link} in {PAGE}; add one for a new engine")
    PAGE.write_text(old.sub(lambda _: row, page), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status is 1 if an engine's tests failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ENGINES)}; all without one")
    parser.add_argument("--write", action="store_true", help="write the rows of docs/engines.md")
    options, extra = parser.parse_known_args(arguments)
    if unknown := set(options.names) - set(ENGINES):
        parser.error(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    if options.write and extra:
        parser.error(f"--write needs all tests of an engine; leave out {' '.join(extra)}")
    failed = []
    for engine in (ENGINES[name] for name in options.names or ENGINES):
        try:
            status, row = examine(engine, build(engine), extra)
        except subprocess.CalledProcessError as error:
            # the other engines are examined nevertheless
            print(f"{engine.title}: {error}", file=sys.stderr)
            status = error.returncode
        if status:
            failed.append(engine.title)
        elif options.write:
            write(engine, row)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
