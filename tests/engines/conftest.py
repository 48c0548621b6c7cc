"""What the tests of an engine find out is kept for docs/engines.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

FINDINGS = "GFSA_ENGINE_FINDINGS"
"""Environment variable with the file that findings are appended to; set by ``engines.run``."""


@pytest.fixture(scope="session")
def record() -> Callable[[str, str], None]:
    """Keeps a finding: ``record("Llama, 40 greedy tokens", "identical")``.

    The checks ``time`` and ``memory`` are the columns of the cost in docs/engines.md. Without
    ``engines.run`` findings are only printed.
    """
    path = os.environ.get(FINDINGS)

    def keep(check: str, result: str) -> None:
        print(f"{check}: {result}")
        if path is not None:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"check": check, "result": result}) + "\n")

    return keep
