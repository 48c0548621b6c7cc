"""Hold out the end of a text that names no parts; documents stay whole wherever they can."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from gfsa_experiments.data.splits import PARTS

SHARE = 0.05
"""Of the text, for each of ``valid`` and ``test``."""
# how far a border may move towards the start to spare a document, a line or a word: a part keeps at
# least half of its share
_REACH = SHARE / 2
# of a line, of a word
_ENDS = (re.compile(r"\n"), re.compile(r"\s"))


def split_documents(documents: Sequence[str], root: str) -> dict[str, list[str]]:
    """The last 5 % of the text to test on, the 5 % before to validate on, the rest to train on.

    Where a document ends shortly before a border between two parts, the parts meet there. Otherwise
    the document that lies across the border is cut: at the end of a line if one is near, of a word,
    or between two characters. No other document is.

    Args:
        root: where the documents are, for messages.
    """
    ends = list(itertools.accumulate(map(len, documents)))
    size = ends[-1] if ends else 0
    begins = [1 - 2 * SHARE, 1 - SHARE]
    borders = [_border(documents, ends, int(share * size), int(_REACH * size)) for share in begins]
    parts: dict[str, list[str]] = {name: [] for name in PARTS}
    for document, end in zip(documents, ends, strict=True):
        start = end - len(document)
        cuts = [min(max(border - start, 0), len(document)) for border in borders]
        for name, first, last in zip(PARTS, [0, *cuts], [*cuts, len(document)], strict=True):
            # blanks that a cut leaves alone are no document
            if document[first:last].strip():
                parts[name].append(document[first:last])
    if not all(parts.values()):
        raise ValueError(
            f"{root} is too little text to be split into {', '.join(PARTS)}: it has "
            f"{counted(size, 'character')} in {counted(len(documents), 'document')}; give more, or "
            "a file for each part"
        )
    return parts


def counted(count: int, what: str) -> str:
    """``1 document``, ``2,000 documents``"""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _border(documents: Sequence[str], ends: Sequence[int], at: int, reach: int) -> int:
    """Where to cut the text at about ``at``, at most ``reach`` characters earlier."""
    number = sum(end <= at for end in ends)
    before = ends[number - 1] if number else 0
    if number and at - before <= reach:
        return before
    if number == len(documents):
        return at
    near = documents[number][max(0, at - reach - before) : at - before]
    for kind in _ENDS:
        found = [match.end() for match in kind.finditer(near)]
        if found:
            return at - len(near) + found[-1]
    return at
