"""What filters cost in an engine is kept for docs/engines.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def costs(record_testsuite_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Times a call of a model with filters and of one without: ``costs(call, filtered, plain)``."""
    # vLLM reads the environment before torch is imported
    from support.measuring import time_ratio

    def compare(
        call: Callable[[Any], Any],
        filtered: Any,
        plain: Any,
        of: str = "a step (2 layers of 128 features, 2 × 256 tokens)",
        rounds: int = 15,
        most: float = 3,
    ) -> None:
        ratio = time_ratio(lambda: call(filtered), lambda: call(plain), rounds)
        record_testsuite_property("time", f"{ratio:.2f}× {of}")
        assert ratio < most

    return compare
