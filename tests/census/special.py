"""Config values that the rules of ``census.shrink`` do not find, by model type."""

from __future__ import annotations

from typing import Any

SPECIAL: dict[str, dict[str, Any]] = {}
