"""What filters cost in an engine is kept for docs/engines.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def costs(record_testsuite_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Times a call with filters beside one without: ``costs(filtered, plain, "a step (…)")``."""
    # vLLM reads the environment before torch is imported
    from support.measuring import time_ratio

    def compare(
        filtered: Callable[[], Any],
        plain: Callable[[], Any],
        of: str,
        rounds: int = 15,
        most: float = 3,
    ) -> None:
        ratio = time_ratio(filtered, plain, rounds)
        record_testsuite_property("time", f"{ratio:.2f}× {of}")
        assert ratio < most

    return compare
