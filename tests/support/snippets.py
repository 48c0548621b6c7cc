"""The Python snippets and the commands of a page of the documentation."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)```\s*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block, and where its first line of code stands in the page."""

    info: str
    code: str
    line: int

    @property
    def runs(self) -> bool:
        return self.info.split() == ["python"]


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page whose language is Python."""
    found = []
    for match in _FENCE.finditer(page):
        info = match["info"].strip()
        if info.split()[:1] != ["python"]:
            continue
        if info not in ("python", "python no-run"):
            raise ValueError(f"expected ```python or ```python no-run, got ```{info}")
        # what is indented under a list item is code all the same
        code = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.M)
        found.append(Block(info, code, page.count("\n", 0, match.start("body")) + 1))
    return found


_ANY_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> list[list[str]]:
    """The words after ``gfsa train`` of every such line of a page's blocks."""
    found = []
    for block in _ANY_FENCE.findall(page):
        for line in block.replace("\\\n", " ").splitlines():
            if "gfsa train " in line:
                words = shlex.split(line.partition("gfsa train ")[2], comments=True)
                found.append(words)
    return found
