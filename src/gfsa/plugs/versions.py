"""Guarding copies of other libraries' forwards against other versions of them."""

from __future__ import annotations

from typing import Any


def reads(cls: Any) -> str:
    """The names that the forward of a class looks up (attributes, methods, functions), sorted.

    An adapter that repeats a forward knows the ones it was written for. A version of the library
    whose forward looks up others is traced instead, so that nothing new in it is left out.
    """
    return " ".join(sorted(cls.forward.__code__.co_names))
