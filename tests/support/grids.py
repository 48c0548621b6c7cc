"""How many programs the fused kernels are launched with."""

from __future__ import annotations

from typing import Any

import pytest

from gfsa.kernels.launching import Launch


def launched_grids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The programs of every launch from now on, in order."""
    grids: list[int] = []
    launch = Launch.__call__

    def note(self: Launch, *args: Any, **options: Any) -> None:
        x, y, z = self.grid
        grids.append(x * y * z)
        launch(self, *args, **options)

    monkeypatch.setattr(Launch, "__call__", note)
    return grids
