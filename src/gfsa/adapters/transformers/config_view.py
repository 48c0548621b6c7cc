"""A config of transformers with another attention implementation, as a view of the real one."""

from __future__ import annotations

import copy
from typing import Any


class ConfigView:
    """Passes everything to the real config; a subclass overrides ``_attn_implementation``."""

    real: Any

    def __init__(self, config: Any) -> None:
        object.__setattr__(self, "real", config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.real, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ConfigView:
        return type(self)(copy.deepcopy(self.real, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.real,)
