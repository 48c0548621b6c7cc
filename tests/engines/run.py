"""Run the tests of engines, each in an environment of its own: ``make engines``.

From the folder ``tests``: ``python -m engines.run [NAME …] [--write]``. An engine is a folder with

- ``requirements.txt``, pinned: what its environment has besides gfsa;
- ``engine.toml``: its title, package, how to start it, the page about it; where its tests are, if
  they are those of another version;
- tests, which keep what they find by the fixture ``record``.

``--write`` keeps findings in ``findings.json`` beside the tests and writes docs/engines.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines import page
from engines.catalogue import ENGINES, ROOT, Engine
from engines.conftest import FINDINGS

ENVIRONMENTS = ROOT / ".venv-engines"
_VERSION = "from importlib.metadata import version; import sys; print(version(sys.argv[1]))"


def build(engine: Engine) -> Path:
    """The Python of an engine's environment, which is built where it is missing or outdated."""
    folder = ENVIRONMENTS / engine.name
    python, done = folder / "bin" / "python", folder / ".done"
    wanted = "\n".join(path.read_text(encoding="utf-8") for path in engine.definition)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        # its entry points may have changed
        subprocess.run([*pip, "install", "-q", "--no-deps", "-e", str(ROOT)], check=True)
        return python
    print(f"{engine.title}: building {folder.relative_to(ROOT)}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    requirements = str(engine.folder / "requirements.txt")
    subprocess.run([*pip, "install", "-q", "-r", requirements, "-e", str(ROOT)], check=True)
    if engine.remove:
        subprocess.run([*pip, "uninstall", "-q", "-y", *engine.remove], check=True)
    done.write_text(wanted, encoding="utf-8")
    return python


def examine(engine: Engine, python: Path, extra: Sequence[str]) -> dict[str, Any]:
    """Run an engine's tests; what they found, how many passed, in how many seconds."""
    kept, report = (ENVIRONMENTS / f"{engine.name}.{kind}" for kind in ("jsonl", "xml"))
    for path in (kept, report):
        path.unlink(missing_ok=True)
    # an engine's console scripts belong to its environment
    programs = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    environment = {**os.environ, FINDINGS: str(kept), "PATH": programs}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # tests that make test leaves out for their time have no other environment to run in
    command += ["-m", "slow or not slow"]
    begun = time.monotonic()
    tests = [str(engine.folder / path) for path in engine.tests]
    outcome = subprocess.run([*command, *extra, *tests], cwd=ROOT, env=environment)
    if not report.exists():
        # pytest ended before the first test; it has said why
        return {"exit": outcome.returncode or 1}
    version = subprocess.run(
        [str(python), "-c", _VERSION, engine.package], capture_output=True, text=True, check=True
    )
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    return {
        "version": version.stdout.strip(),
        "seconds": round(time.monotonic() - begun),
        "exit": outcome.returncode,
        **counts,
        "findings": [json.loads(line) for line in lines],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status is 1 if an engine's tests failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ENGINES)}; all without one")
    parser.add_argument("--write", action="store_true", help="keep findings, write docs/engines.md")
    options, extra = parser.parse_known_args(arguments)
    if unknown := set(options.names) - set(ENGINES):
        parser.error(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    if options.write and extra:
        parser.error(f"--write needs all tests of an engine; leave out {' '.join(extra)}")
    failed = []
    for engine in (ENGINES[name] for name in options.names or ENGINES):
        try:
            found = examine(engine, build(engine), extra)
        except subprocess.CalledProcessError as error:
            # the other engines are examined nevertheless
            print(f"{engine.title}: {error}", file=sys.stderr)
            found = {"exit": error.returncode}
        if found["exit"]:
            failed.append(engine.title)
        elif options.write:
            text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
            engine.findings.write_text(text, encoding="utf-8")
    if options.write:
        page.write()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
