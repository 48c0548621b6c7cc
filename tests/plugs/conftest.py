"""docs/supported.md is written by the tests: each one states its row and checks that it is there.

``pytest tests/plugs --write-supported`` rewrites the file from what the run found.
"""

from __future__ import annotations

import itertools
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from census.page import BEGIN
from support.supported import HEADER, TABLE, Row, Supported

FILE = Path(__file__).parents[2] / "docs" / "supported.md"
_rows: list[Row] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-supported", action="store_true", help=f"rewrite {FILE.name}")


@pytest.fixture
def supported(request: pytest.FixtureRequest) -> Supported:
    """``supported(library, model, report, …)``: this test's row in the table."""
    writing = request.config.getoption("--write-supported", default=False)
    text = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    return Supported(_rows, None if writing else text)


# a hook of pytest-xdist, without which these tests run, too
@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """What a worker of pytest-xdist has stated comes to where all of it is looked at."""
    _rows.extend(Row(*cells) for cells in getattr(node, "workeroutput", {}).get("supported", []))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["supported"] = [astuple(row) for row in _rows]
    elif config.getoption("--write-supported", default=False) and exitstatus == 0:
        lines = [row.line for row in sorted(_rows)]
        # the census comes after the table
        old = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
        census = old[old.index(BEGIN) :] if BEGIN in old else ""
        text = "\n".join([HEADER, *lines]) + "\n"
        FILE.write_text(text + (f"\n{census}" if census else ""), encoding="utf-8")
    elif _everything_ran(config) and exitstatus == 0:
        stated = {row.line for row in _rows}
        written = FILE.read_text(encoding="utf-8").splitlines()
        rows = itertools.takewhile(lambda line: line, written[written.index(TABLE) + 2 :])
        stale = [line for line in rows if line not in stated]
        if stale:
            print(f"\nno test states these rows of {FILE.name}:", *stale, sep="\n")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _everything_ran(config: pytest.Config) -> bool:
    options = ("keyword", "markexpr", "ignore", "ignore_glob", "deselect", "lf", "collectonly")
    chosen = any(getattr(config.option, name, None) for name in options)
    ran = {Path(arg).resolve() for arg in config.args}
    return not chosen and not ran.isdisjoint({*Path(__file__).parents[:2], config.rootpath})
