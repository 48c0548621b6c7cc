"""What the code of a function mentions: names and strings, also in the functions inside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any


def names_in(function: Callable[..., Any]) -> set[str]:
    """Globals and attributes that a function mentions; a lambda in it may be the one that does."""
    return {name for code in _codes(function) for name in code.co_names}


def strings_in(function: Callable[..., Any]) -> set[str]:
    """Strings that a function mentions, alone or in a tuple, and names of arguments that it passes.

    Its documentation is one of them.
    """
    found: set[str] = set()
    for code in _codes(function):
        for constant in code.co_consts:
            parts = constant if isinstance(constant, tuple) else (constant,)
            found.update(part for part in parts if isinstance(part, str))
    return found


def _codes(function: Callable[..., Any]) -> Iterator[CodeType]:
    code = getattr(function, "__code__", None)
    waiting = [] if code is None else [code]
    while waiting:
        code = waiting.pop()
        yield code
        waiting.extend(inner for inner in code.co_consts if isinstance(inner, CodeType))
