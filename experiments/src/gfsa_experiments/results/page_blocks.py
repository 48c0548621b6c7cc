"""A page as a list of blocks: as Markdown, in a terminal, and in a file with a generated part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gfsa_experiments.results.number_format import NONE

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table; the columns named in ``words`` are aligned left, the others right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Commands:
    """The commands that made the numbers above; collapsed on a page, left out in a terminal."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Picture:
    path: str
    text: str


Block = Heading | Text | Bullets | Grid | Commands | Picture


def to_markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Commands(lines):
            code = "\n".join(lines)
            return f"<details><summary>Commands</summary>\n\n```\n{code}\n```\n\n</details>"
        case Picture(path, text):
            return f"![{text}]({path})"
        case Grid(columns, rows, words):
            rules = ["---" if column in words else "---:" for column in columns]
            cells = [columns, rules, *rows]
            return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in cells)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def show(blocks: Sequence[Block], console: Console) -> None:
    """Print to a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text as RichText

    for block in blocks:
        match block:
            case Heading(text, level):
                console.print(RichText(text, style="bold underline" if level < 3 else "bold"))
            case Text(text):
                console.print(RichText(_unmarked(text)))
            case Bullets(items):
                for item in items:
                    console.print(RichText(f"• {_unmarked(item)}", style="dim"))
            case Grid(columns, rows, words):
                # to save width, columns without any value are left out
                kept = [at for at in range(len(columns)) if {row[at] for row in rows} != {NONE}]
                shown = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
                for at in kept:
                    side: JustifyMethod = "left" if columns[at] in words else "right"
                    shown.add_column(columns[at], justify=side)
                for row in rows:
                    shown.add_row(*(RichText(row[at]) for at in kept))
                console.print(shown)
            case Commands() | Picture():
                continue
        console.print()


def _unmarked(text: str) -> str:
    """Text without Markdown's marks for emphasis and code."""
    return re.sub(r"\*+|`", "", text)


BEGIN = "<!-- gfsa results: begin -->"
END = "<!-- gfsa results: end -->"


def update_page(path: Path, generated: str) -> None:
    """Replace the part of ``path`` between two marks; a page that does not exist is created."""
    page = path.read_text(encoding="utf-8") if path.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    counts = page.count(BEGIN), page.count(END)
    if counts != (1, 1) or page.index(BEGIN) > page.index(END):
        raise ValueError(
            f"{path} must have one line {BEGIN} and after it one line {END}, around the generated "
            f"part; it has {counts[0]} and {counts[1]}. Nothing was written"
        )
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    # an interrupted write leaves the old page
    draft = path.with_name(path.name + ".new")
    draft.write_text(f"{before}{BEGIN}\n\n{generated.strip()}\n\n{END}{after}", encoding="utf-8")
    draft.replace(path)
