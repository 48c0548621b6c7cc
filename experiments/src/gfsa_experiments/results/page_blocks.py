"""A page as a list of blocks: as Markdown, in a terminal, and in a file with a generated part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gfsa_experiments.results.number_format import NONE

if TYPE_CHECKING:
    from rich.console import Console


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
    """Print to a terminal, without commands, pictures and columns that have no value."""
    from rich.markdown import Markdown

    kept = [_narrowed(block) for block in blocks if not isinstance(block, Commands | Picture)]
    console.print(Markdown(to_markdown(kept)))


def _narrowed(block: Block) -> Block:
    if not isinstance(block, Grid):
        return block
    kept = [at for at in range(len(block.columns)) if {row[at] for row in block.rows} != {NONE}]
    rows = [[row[at] for at in kept] for row in block.rows]
    return Grid([block.columns[at] for at in kept], rows, block.words)


BEGIN = "<!-- gfsa results: begin -->"
END = "<!-- gfsa results: end -->"


def updated_page(
    path: Path, title: str, blocks: Sequence[Block], marks: tuple[str, str] = (BEGIN, END)
) -> str:
    """The page ``path`` with a new part between its two marks; without a page, a new one."""
    begin, end = marks
    page = path.read_text(encoding="utf-8") if path.exists() else f"# {title}\n\n{begin}\n{end}\n"
    return with_part(page, path, blocks, marks)


def with_part(page: str, path: Path, blocks: Sequence[Block], marks: tuple[str, str]) -> str:
    """The text of a page with a new part between two marks; ``path`` is for the error."""
    begin, end = marks
    counts = page.count(begin), page.count(end)
    if counts != (1, 1) or page.index(begin) > page.index(end):
        raise ValueError(
            f"{path} must have one line {begin} and after it one line {end}, around the generated "
            f"part; it has {counts[0]} and {counts[1]}. Nothing was written"
        )
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n\n{to_markdown(blocks).strip()}\n\n{end}{after}"


def write_pages(pages: Mapping[Path, str]) -> None:
    for path, page in pages.items():
        # an interrupted write leaves the old page
        draft = path.with_name(path.name + ".new")
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
