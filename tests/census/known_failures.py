"""Entries that fail and are not mended yet; docs/supported.md says what is wrong with each.

The list only ever gets shorter: an entry that fails and is not here fails the tests, and so does an
entry that is here and does not fail any more.
"""

from __future__ import annotations

KNOWN: frozenset[str] = frozenset()
