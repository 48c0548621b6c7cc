"""``gfsa results``: compare methods from the rows of runs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pandas import DataFrame

    from gfsa_experiments.results.families import Judged
    from gfsa_experiments.results.tables import ResultTable

PARTS = ("verdicts", "domains", "costs", "tables", "tuning", "forest", "scores")
FOREST = "forest.svg"
# a generated part of a page: the command whose output stands between two marks
_PART = re.compile(r"<!-- gfsa results(?P<words>[^>]*?) -->(?P<old>.*?)<!-- end -->", re.DOTALL)
_MARK = re.compile(r"<!-- (?:gfsa results[^>]*?|end) -->")


def results(
    folder: Annotated[Path, typer.Option("--dir", help="The folder with the rows of runs.")] = Path(
        "results"
    ),
    show: Annotated[str, typer.Option(help=f"Only this part: {', '.join(PARTS)}.")] = "",
    recipe: Annotated[str, typer.Option(help="Only this recipe: glue, image …")] = "",
    task: Annotated[str, typer.Option(help="Only tasks whose name has this in it.")] = "",
    method: Annotated[
        str, typer.Option(help="Only these methods or lines, separated by commas (and plain).")
    ] = "",
    contrast: Annotated[str, typer.Option(help="'A - B': compare any two lines of a task.")] = "",
    family: Annotated[str, typer.Option(help="Only families/NAME.toml; several by commas.")] = "",
    plan: Annotated[
        Path | None, typer.Option(help="Write the family's runs here, for gfsa train --plan.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown, also in a terminal.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the forest plot: .png, .svg or .pdf.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Update the marked parts of the folder's pages.")
    ] = False,
) -> None:
    """Compare methods over paired seeds: differences with intervals, verdicts, costs.

    Example: gfsa results --recipe text --method gfsa,degree1
    """
    asked = Asked(show, recipe, task, method, contrast, family)
    try:
        asked.check()
        if write and asked != Asked():
            raise ValueError("--write makes whole pages; leave out every option but --dir")
        if plan is not None and not family:
            raise ValueError("--plan writes the runs of a family; name it by --family")
        _refuse_places(plan, plot)
        found = Folder(folder)
        if plan is not None:
            _write_plan(found, family, plan)
        if plot is not None:
            from gfsa_experiments.results import figures

            figures.plot(found.chosen(asked), plot, found.judged)
            typer.echo(f"wrote {plot}", err=True)
        if write:
            typer.echo(f"wrote {', '.join(map(str, write_folder(found)))}", err=True)
        else:
            _print("\n\n".join(blocks_of(found, asked)) + "\n", markdown)
    except (ValueError, OSError) as error:
        typer.echo(f"gfsa results: {error}", err=True)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        typer.echo(
            f"gfsa results needs {error.name}. In a checkout of gfsa: pip install ./experiments",
            err=True,
        )
        raise typer.Exit(1) from error


@dataclass(frozen=True)
class Asked:
    """The options that say what is shown, of a command or of a page's mark."""

    show: str = ""
    recipe: str = ""
    task: str = ""
    method: str = ""
    contrast: str = ""
    family: str = ""

    def check(self) -> None:
        """Raise ValueError for options of which one would be ignored."""
        if self.show not in ("", *PARTS):
            raise ValueError(f"--show takes {', '.join(PARTS)}, got {self.show!r}")
        if self.family and (self.recipe or self.task or self.method):
            raise ValueError("--family shows families; leave out --recipe, --task and --method")
        if self.contrast and (self.method or self.show or self.family):
            raise ValueError("--contrast names its lines; leave out --method, --show and --family")


class Folder:
    """What the rows of a folder say; each part is read when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _families(self) -> list[Any]:
        from gfsa_experiments.results.families import read_families

        return read_families(self.path)

    @cached_property
    def _rows(self) -> DataFrame:
        from gfsa_experiments.results.families import refuse_unregistered
        from gfsa_experiments.results.tables import read_folder

        # a family is there before its first run, and --plan writes what to run
        rows = read_folder(self.path, may_be_empty=bool(self._families))
        refuse_unregistered(self._families, rows, self.tuning)
        return rows

    @cached_property
    def tuning(self) -> DataFrame:
        """The rows by which arms were tuned."""
        from gfsa_experiments.results.tables import read_folder

        return read_folder(self.path / "tuning", may_be_empty=True)

    @cached_property
    def judged(self) -> list[Judged]:
        from gfsa_experiments.results.families import outcomes

        rows = self._rows[~self._rows.replaced]
        return [(family, outcomes(family, rows)) for family in self._families]

    @cached_property
    def tables(self) -> list[ResultTable]:
        """Exploratory; runs of families are not among them."""
        from gfsa_experiments.results.families import is_of
        from gfsa_experiments.results.tables import make_tables

        keys = {key for family in self._families for key in family.keys}
        return make_tables(self._rows[~is_of(self._rows, keys)])

    @cached_property
    def times(self) -> list[ResultTable]:
        from gfsa_experiments.results.tables import make_tables, read_folder

        return make_tables(read_folder(self.path / "times", may_be_empty=True))

    def families(self, asked: Asked) -> list[Judged]:
        """The families that are asked for by name, recipe or task."""
        by_name = {family.name: (family, outcomes) for family, outcomes in self.judged}
        if asked.family:
            names = asked.family.split(",")
            unknown = [name for name in names if name not in by_name]
            if unknown:
                there = ", ".join(by_name) or "none"
                raise ValueError(f"there is no family {unknown[0]!r}; there are {there}")
            return [by_name[name] for name in names]
        return [
            (family, outcomes)
            for family, outcomes in self.judged
            if any(
                asked.recipe in ("", recipe) and asked.task in task
                for comparison in family.comparisons
                for recipe, task in comparison.tasks
            )
        ]

    def chosen(self, asked: Asked) -> list[ResultTable]:
        """The exploratory tables and lines that are asked for; a ValueError says what there is."""
        tables = [t for t in self.tables if asked.recipe in ("", t.recipe) and asked.task in t.task]
        if (asked.recipe or asked.task) and not tables:
            there = ", ".join(sorted({f"{t.recipe}: {t.task}" for t in self.tables})) or "none"
            names = ", ".join(family.name for family, _ in self.families(asked))
            more = f". Runs of families are shown by --family: {names}" if names else ""
            raise ValueError(f"no exploratory run of such a task; there are {there}{more}")
        wanted = {name.strip() for name in asked.method.split(",") if name.strip()}
        return _of_methods(tables, wanted) if wanted else tables


def _of_methods(tables: Sequence[ResultTable], wanted: set[str]) -> list[ResultTable]:
    """The tables that have a line of these methods or names, with those lines and plain's."""
    known = {name for table in tables for line in table.lines for name in (line.method, line.name)}
    if wanted - known:
        raise ValueError(
            f"no run of method {', '.join(sorted(wanted - known))}; "
            f"there are {', '.join(sorted(known))}"
        )
    found = []
    for table in tables:
        kept = tuple(line for line in table.lines if wanted & {line.method, line.name})
        plain = tuple(line for line in table.lines if line.method == "plain" and line not in kept)
        if kept:
            found.append(replace(table, lines=(*plain, *kept), replaced=table.replaced[:0]))
    return found


def blocks_of(found: Folder, asked: Asked) -> list[str]:
    """What a command or a mark shows, as paragraphs and tables in Markdown."""
    from gfsa_experiments.results import report

    asked.check()
    if asked.contrast:
        return report.contrast_blocks(found.chosen(asked), asked.contrast)
    if asked.family and not asked.show:
        families = found.families(asked)
        return [block for judged in families for block in report.family_section(*judged)]
    if asked.show == "verdicts":
        return report.verdicts(found.families(asked))
    if asked.show == "scores":
        return report.score_blocks(found.families(asked))
    if asked.show == "domains":
        return report.domain_blocks(found.chosen(asked))
    if asked.show == "costs":
        return report.cost_blocks([t for t in found.times if asked.recipe in ("", t.recipe)])
    if asked.show == "tuning":
        rows = found.tuning[~found.tuning.replaced]
        kept = rows[rows.task.str.contains(asked.task, regex=False)] if asked.task else rows
        return report.tuning_blocks(kept[kept.recipe == asked.recipe] if asked.recipe else kept)
    if asked.show == "tables":
        return report.table_blocks(found.chosen(asked))
    if asked.show == "forest":
        return [f"![Relative error reduction with 95 % intervals]({FOREST})"]
    shown = found.chosen(asked)
    parts = {"Exploratory comparisons": report.table_blocks(shown)}
    if not found.judged:
        parts = {"In words": report.answers(shown), "In numbers": report.table_blocks(shown)}
    elif asked == Asked():
        parts = {
            "Confirmatory comparisons": report.verdicts(found.judged),
            "Exploratory, by domain": report.domain_blocks(found.tables),
            "What it costs": report.cost_blocks(found.times),
        } | parts
    return [block for name, own in parts.items() if own for block in (f"## {name}", *own)]


def write_folder(found: Folder) -> list[Path]:
    """Update the pages of a folder and the README beside it, all or none; the paths written.

    A folder without a README gets one with everything in it.
    """
    first = found.path / "README.md"
    if not first.exists():
        parts = [f"<!-- gfsa results --show {part} -->\n<!-- end -->\n" for part in PARTS[:4]]
        first.write_text("\n".join(["# Results\n", *parts]), encoding="utf-8")
    root = found.path.resolve().parent
    pages = {}
    for path in (*sorted(found.path.glob("*.md")), root / "README.md"):
        if path.exists() and "<!-- gfsa results" in path.read_text(encoding="utf-8"):
            beside = "" if path.resolve().parent != root else f"{found.path.resolve().name}/"
            pages[path] = _updated(path, found, beside)
    if any("--show forest -->" in page for page in pages.values()):
        from gfsa_experiments.results import figures

        figures.plot(found.tables, found.path / FOREST, found.judged)
    for path, page in pages.items():
        # an interrupted write leaves the old page
        draft = path.with_name(path.name + ".new")
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    return list(pages)


def _updated(path: Path, found: Folder, prefix: str) -> str:
    """The page with every generated part made anew, from the options in its first mark."""
    page = path.read_text(encoding="utf-8")
    if 2 * len(_PART.findall(page)) != len(_MARK.findall(page)):
        raise ValueError(
            f"{path}: every mark <!-- gfsa results … --> needs an <!-- end --> before the next. "
            "Nothing was written"
        )
    return _PART.sub(partial(_part, found, prefix), page)


def _part(found: Folder, prefix: str, part: re.Match[str]) -> str:
    """One mark with its Markdown; ``prefix`` leads from its page to the folder of rows."""
    flags = shlex.split(part["words"])
    pairs = zip(flags[::2], flags[1::2], strict=False)
    given = {flag.removeprefix("--"): value for flag, value in pairs}
    inside = given.pop("dir", None)
    unknown = [name for name in given if name not in Asked.__dataclass_fields__]
    if len(flags) % 2 or unknown:
        raise ValueError(
            f"a mark takes the options --dir, --{', --'.join(Asked.__dataclass_fields__)}, "
            f"each with a value, got {part['words'].strip()!r}"
        )
    rows = found if inside is None else Folder(found.path.resolve().parent / inside)
    text = "\n\n".join(blocks_of(rows, Asked(**given))).strip()
    text = text.replace("](families/", f"]({prefix}families/")
    text = text.replace(f"]({FOREST}", f"]({prefix}{FOREST}")
    return f"<!-- gfsa results{part['words']} -->\n\n{text}\n\n<!-- end -->"


def _write_plan(found: Folder, name: str, plan: Path) -> None:
    ((family, _), *others) = found.families(Asked(family=name))
    if others:
        raise ValueError(f"--plan writes the runs of one family, got {name}")
    if family.withdrawn:
        raise ValueError(f"the family {name} is withdrawn: {family.withdrawn}")
    plan.write_text("\n".join([f"# {family.title}", *family.plan, ""]), encoding="utf-8")
    typer.echo(f"wrote {plan}: {len(family.keys)} runs", err=True)


def _refuse_places(*places: Path | None) -> None:
    """Raise for a file that cannot be written, before anything is read."""
    from gfsa_experiments.engine.whole_files import refuse_inside_file

    for place in filter(None, places):
        if place.is_dir():
            raise ValueError(f"{place} is a folder; name a file in it")
        refuse_inside_file(place)


def _print(text: str, markdown: bool) -> None:
    if markdown or not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(re.sub(r"!\[.*?\]\(.*?\)", "", text)))
