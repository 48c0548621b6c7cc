"""Failures that the census has found and that are not mended yet, with what is wrong.

The list only ever gets shorter: an entry that fails and is not here fails the tests, and so does an
entry that is here and does not fail any more.
"""

from __future__ import annotations

KNOWN: dict[str, str] = {}
