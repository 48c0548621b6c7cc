"""What gfsa says when it refuses, after it has plugged a model."""

from __future__ import annotations

import os
import traceback

import gfsa
from gfsa.plugs.tracing.capture import TraceError


class CacheRefusalError(Exception):
    """gfsa asks for a forward without a cache."""


class AnotherShapeError(Exception):
    """gfsa asks for another number of samples or tokens in the first forward of a module."""

    def __init__(self, reason: str, site: str) -> None:
        super().__init__(reason)
        self.site = site


class LateRefusalError(Exception):
    """A module that has a filter refuses its first forward."""

    def __init__(self, modules: dict[str, str], reason: str) -> None:
        super().__init__(reason)
        self.modules = modules
        self.reason = reason


def is_refusal(error: BaseException) -> bool:
    """Whether gfsa itself raised the error, with words of its own."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = os.path.dirname(os.path.abspath(gfsa.__file__))
    return os.path.abspath(last).startswith(ours) and isinstance(
        error, ValueError | TypeError | NotImplementedError | TraceError
    )
