"""The committed page: what is between two marks is generated, the rest is written by hand."""

from __future__ import annotations

from pathlib import Path

BEGIN = "<!-- gfsa results: begin -->"
END = "<!-- gfsa results: end -->"


def update_page(path: Path, generated: str) -> None:
    """Put ``generated`` between the marks of ``path``; a page that does not exist is begun."""
    page = path.read_text(encoding="utf-8") if path.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    counts = page.count(BEGIN), page.count(END)
    if counts != (1, 1) or page.index(BEGIN) > page.index(END):
        raise ValueError(
            f"{path} must have one line {BEGIN} and after it one line {END}, to say where the "
            f"generated part goes; it has {counts[0]} and {counts[1]}. Nothing was written"
        )
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    text = f"{before}{BEGIN}\n\n{generated.strip()}\n\n{END}{after}"
    # beside it first, so that a write cut short leaves the old page whole
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
