"""docs/matrix.md is written by the tests: each one states its cell and checks that it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.subjects import Matrix, page, parse

FILE = Path(__file__).parents[2] / "docs" / "matrix.md"
_cells: dict[tuple[str, str], str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-matrix", action="store_true", help=f"rewrite {FILE.name}")


@pytest.fixture
def matrix(request: pytest.FixtureRequest) -> Matrix:
    """``matrix(feature, subject)``: what this test has shown, said at its end."""
    writing = request.config.getoption("--write-matrix", default=False)
    text = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    return Matrix(_cells, None if writing else text)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--write-matrix", default=False) and exitstatus == 0:
        # what this run did not ask stays as it is
        known = parse(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        FILE.write_text(page({**known, **_cells}), encoding="utf-8")
