"""What is shown of a folder of rows, by ``gfsa results`` and between the marks of pages."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gfsa_experiments.engine.whole_files import write_text
from gfsa_experiments.results import report
from gfsa_experiments.results.families import (
    Judged,
    is_of,
    outcomes,
    read_families,
    refuse_unregistered,
)
from gfsa_experiments.results.tables import PLAIN, ResultTable, make_tables, read_folder

PARTS = ("verdicts", "tables", "overall", "tuning", "forest", "scores", "speed")
FOREST = "forest.svg"
# a generated part of a page: the command whose output stands between two marks
_PART = re.compile(r"<!-- gfsa results(?P<words>[^>]*?) -->(?P<old>.*?)<!-- end -->", re.DOTALL)
_MARK = re.compile(r"<!-- (?:gfsa results[^>]*?|end) -->")


@dataclass(frozen=True)
class Asked:
    """The options that say what is shown, of a command or of a page's mark."""

    show: str = ""
    recipe: str = ""
    task: str = ""
    method: str = ""
    against: str = ""
    family: str = ""

    def check(self) -> None:
        """Raise ValueError for options that would be ignored."""
        if self.show not in ("", *PARTS):
            raise ValueError(f"--show takes {', '.join(PARTS)}, got {self.show!r}")
        if self.family and (self.recipe or self.task or self.method or self.against):
            raise ValueError(
                "--family shows families; leave out --recipe, --task, --method and --against"
            )
        if self.against and self.show not in ("", "tables"):
            raise ValueError(f"--against changes tables; leave out --show {self.show}")


class Folder:
    """What the rows of a folder say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        families = read_families(path)
        # a family is there before its first run, and --plan writes what to run
        rows = read_folder(path, may_be_empty=bool(families))
        # the rows that settings were chosen by
        self.tuning = read_folder(path / "tuning", may_be_empty=True)
        refuse_unregistered(families, rows, self.tuning)
        latest = rows[~rows.replaced]
        self.judged: list[Judged] = [(family, outcomes(family, latest)) for family in families]
        self.exploratory = rows[~is_of(rows, {key for family in families for key in family.keys})]
        self.tables = make_tables(self.exploratory)

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
        every = make_tables(self.exploratory, asked.against) if asked.against else self.tables
        tables = [t for t in every if asked.recipe in ("", t.recipe) and asked.task in t.task]
        if (asked.recipe or asked.task) and not tables:
            there = ", ".join(sorted({f"{t.recipe}: {t.task}" for t in every})) or "none"
            names = ", ".join(family.name for family, _ in self.families(asked))
            more = f". Runs of families are shown by --family: {names}" if names else ""
            raise ValueError(f"no exploratory run of such a task; there are {there}{more}")
        known = {name for t in tables for line in t.lines for name in (line.method, line.name)}
        wanted = {name.strip() for name in asked.method.split(",") if name.strip()}
        reference = {asked.against} if asked.against else set()
        unknown = (wanted | reference) - known
        if unknown:
            raise ValueError(
                f"no run of method {', '.join(sorted(unknown))}; "
                f"there are {', '.join(sorted(known))}"
            )
        if not wanted:
            return tables
        shown = []
        for table in tables:
            if any(wanted & {line.method, line.name} for line in table.lines):
                kept = wanted | (reference or {PLAIN})
                lines = tuple(line for line in table.lines if kept & {line.method, line.name})
                shown.append(replace(table, lines=lines, replaced=table.replaced[:0]))
        return shown


def blocks_of(found: Folder, asked: Asked) -> list[str]:
    """What a command or a mark shows, as paragraphs and tables in Markdown."""
    asked.check()
    if asked.family and not asked.show:
        return [block for one in found.families(asked) for block in report.family_section(*one)]
    if asked.show == "verdicts":
        return report.verdicts(found.families(asked))
    if asked.show == "scores":
        return report.score_blocks(found.families(asked))
    if asked.show == "tuning":
        rows = found.tuning[~found.tuning.replaced]
        rows = rows[rows.task.str.contains(asked.task, regex=False)]
        return report.tuning_blocks(rows[rows.recipe == asked.recipe] if asked.recipe else rows)
    if asked.show == "speed":
        return report.speed_blocks(found.path / "bench.csv", asked.recipe, asked.task)
    if asked.show == "forest":
        return [f"![Relative error reduction with 95 % intervals]({FOREST})"]
    shown = found.chosen(asked)
    if asked.show == "overall":
        return report.overall(shown)
    tables = report.table_blocks(shown, asked.against or PLAIN)
    if asked.show == "tables":
        return tables
    parts = {"Exploratory comparisons": tables}
    if not found.judged:
        parts = {"In words": report.answers(shown, asked.against or PLAIN), "In numbers": tables}
    elif asked == Asked():
        parts = {
            "Confirmatory comparisons": report.verdicts(found.judged),
            "All exploratory comparisons": report.overall(shown),
        } | parts
    return [block for name, own in parts.items() if own for block in (f"## {name}", *own)]


def write_folder(found: Folder) -> list[Path]:
    """Update the pages of a folder and the README beside it, all or none; the paths written.

    A folder without a README gets one with everything in it.
    """
    first = found.path / "README.md"
    if not first.exists():
        parts = [f"<!-- gfsa results --show {part} -->\n<!-- end -->\n" for part in PARTS[:3]]
        first.write_text("\n".join(["# Results\n", *parts]), encoding="utf-8")
    root = found.path.resolve().parent
    pages = {}
    for path in (*sorted(found.path.glob("*.md")), root / "README.md"):
        if path.exists() and "<!-- gfsa results" in path.read_text(encoding="utf-8"):
            beside = "" if path.resolve().parent != root else f"{found.path.resolve().name}/"
            pages[path] = _updated(path, found, beside)
    if any("--show forest -->" in page for page in pages.values()):
        report.plot(found.tables, found.path / FOREST, found.judged)
    for path, page in pages.items():
        write_text(path, page)
    return list(pages)


def _updated(path: Path, found: Folder, prefix: str) -> str:
    """The page with every generated part made anew, from the options in its first mark.

    ``prefix`` leads from the page to the folder of rows.
    """
    page = path.read_text(encoding="utf-8")
    if 2 * len(_PART.findall(page)) != len(_MARK.findall(page)):
        raise ValueError(
            f"{path}: every mark <!-- gfsa results … --> needs an <!-- end --> before the next. "
            "Nothing was written"
        )

    def made(part: re.Match[str]) -> str:
        flags = shlex.split(part["words"])
        pairs = zip(flags[::2], flags[1::2], strict=False)
        given = {flag.removeprefix("--"): value for flag, value in pairs}
        inside = given.pop("dir", None)
        known = asdict(Asked())
        if len(flags) % 2 or given.keys() - known:
            raise ValueError(
                f"a mark takes the options --dir, --{', --'.join(known)}, each with a value, "
                f"got {part['words'].strip()!r}"
            )
        rows = found if inside is None else Folder(found.path.resolve().parent / inside)
        text = "\n\n".join(blocks_of(rows, Asked(**given))).strip()
        text = re.sub(rf"\]\((?=families/|{re.escape(FOREST)})", f"]({prefix}", text)
        return f"<!-- gfsa results{part['words']} -->\n\n{text}\n\n<!-- end -->"

    return _PART.sub(made, page)


def write_plan(found: Folder, name: str, plan: Path) -> int:
    """Write the commands of a family's runs as a plan; returns how many runs it has."""
    ((family, _), *others) = found.families(Asked(family=name))
    if others:
        raise ValueError(f"--plan writes the runs of one family, got {name}")
    if family.withdrawn:
        raise ValueError(f"the family {name} is withdrawn: {family.withdrawn}")
    plan.write_text("\n".join([f"# {family.title}", *family.plan, ""]), encoding="utf-8")
    return len(family.keys)
