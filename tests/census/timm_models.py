"""One small model of each model file of timm that has attention."""

from __future__ import annotations

from typing import Any

TIMM: dict[str, tuple[str, dict[str, Any]]] = {}
