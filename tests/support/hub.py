"""A package ``datasets`` without a network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


class HubPart(dict[str, list[Any]]):
    """As much of a ``datasets.Dataset`` as is used: columns by name."""

    @property
    def column_names(self) -> list[str]:
        return list(self)

    @property
    def features(self) -> dict[str, Any]:
        return dict.fromkeys(self)

    def to_pandas(self) -> Any:
        import pandas as pd

        return pd.DataFrame(dict(self))


def fake_hub(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]) -> list[tuple[str, ...]]:
    """``load`` in the place of ``load_dataset``; gives a list of what it will be asked for."""
    asked: list[tuple[str, ...]] = []

    def load_dataset(*which: str, split: str | None = None) -> Any:
        asked.append(which if split is None else (*which, split))
        return load(*asked[-1])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def fake_parts(monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any]) -> None:
    """All parts of a data set at once, as ``load_dataset`` gives them without ``split``."""
    fake_hub(monkeypatch, lambda *which: parts)
