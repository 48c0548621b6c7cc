"""docs/supported.md is written by the tests: each one states its row and checks that it is there.

``pytest tests/plugs --write-supported`` rewrites the file from what the run found.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.supported import HEADER, Row, Supported

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


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--write-supported", default=False) and exitstatus == 0:
        lines = [row.line for row in sorted(_rows)]
        FILE.write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
