"""The committed pages: made from the rows alone, short, and in agreement with each other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import matplotlib
import pytest
from typer.testing import CliRunner

from gfsa import cli
from gfsa_experiments.results.families import is_of, read_families, refuse_unregistered
from gfsa_experiments.results.load_rows import read_folder, read_folder_if_any
from gfsa_experiments.results.page_blocks import BEGIN, END

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGES = sorted(path.name for path in RESULTS.glob("*.md") if BEGIN in path.read_text("utf-8"))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table(page: str, first: str) -> list[list[str]]:
    """The lines of the table whose first cells are these, without its header."""
    lines = page.splitlines()
    (start,) = [at for at, line in enumerate(lines) if line.startswith(first)]
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append(cells(line))
    return found


def test_the_pages_are_made_from_the_rows_alone(tmp_path: Path) -> None:
    """To the byte: what ``gfsa results --write`` would put between the marks is there already."""
    for name in ("families", "times", "tuning"):
        shutil.copytree(RESULTS / name, tmp_path / name)
    for path in RESULTS.glob("*.csv"):
        shutil.copy(path, tmp_path)
    for name in PAGES:
        # only what is written by hand
        page = (RESULTS / name).read_text("utf-8")
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        (tmp_path / name).write_text(f"{before}{BEGIN}\n{END}{after}", "utf-8")
    figure = tmp_path / "forest.svg"
    arguments = ["results", "--dir", str(tmp_path), "--write", "--paper", "--plot", str(figure)]
    done = CliRunner().invoke(cli.build(), arguments)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.glob("*.md")) == PAGES
    for name in PAGES:
        # the command names the folder
        made = (tmp_path / name).read_text("utf-8").replace(f" --dir {tmp_path}", "")
        assert made.replace(str(tmp_path), "results") == (RESULTS / name).read_text("utf-8"), name
    drawn, committed = (path.read_text("utf-8") for path in (figure, RESULTS / "forest.svg"))
    # another version of matplotlib may place text elsewhere, but draws the same marks
    version = f"Matplotlib v{matplotlib.__version__}"
    assert drawn == committed if version in committed else texts(drawn) == texts(committed)


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)<", svg)


def test_every_recipe_with_exploratory_rows_has_a_page() -> None:
    rows = read_folder(RESULTS).rows
    keys = {key for family in read_families(RESULTS) for key in family.keys}
    recipes = set(rows[~is_of(rows, keys)].recipe)
    assert {f"{recipe}.md" for recipe in recipes} | {"README.md"} == set(PAGES)


def test_the_first_page_is_one_screen() -> None:
    page = (RESULTS / "README.md").read_text("utf-8")
    assert len(page.splitlines()) < 70
    answer = page.partition("\n\n")[2].partition("\n\n")[0]
    assert len(answer.splitlines()) == 3


def test_the_readme_agrees_with_the_first_page() -> None:
    """A table of at most eight lines; a number that differs is copied from results/README.md."""
    readme = (ROOT / "README.md").read_text("utf-8")
    page = (RESULTS / "README.md").read_text("utf-8")
    shown = table(readme, "| domain | degree 1 | GFSA | GFSA to degree 1 |")
    assert 0 < len(shown) <= 8
    assert shown == [[line[0], *line[3:]] for line in table(page, "| domain | tasks |")]
    (count,) = re.findall(r"negative in (\d+ of \d+) runs that learned it from", page)
    assert f"negative in {count} runs that learned it from" in " ".join(readme.split())


def test_the_readme_says_of_stsb_what_its_family_says() -> None:
    page = (RESULTS / "README.md").read_text("utf-8").partition("[stsb](")[2]
    (line,) = [cells for cells in table(page, "| comparison |") if cells[0] == "w0 − plain"]
    assert "not shown" in line
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"brings {line[3]} Spearman" in readme


def test_the_readme_says_of_pretraining_what_its_family_says() -> None:
    lines = table((RESULTS / "pretraining.md").read_text("utf-8"), "| question | difference |")
    found = {line[1]: line[3:] for line in lines}
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    for name, words in (
        ("GFSA − plain", "{} nats lower than plain ({} … {}, {}: Holm's p = {})"),
        ("degree 1 − plain", "{} nats less loss ({} … {}; {})"),
    ):
        nats, holm, verdict = found[name]
        mean, low, high = re.findall(r"−([\d.]+)", nats)
        assert words.format(mean, high, low, verdict, holm) in readme


def test_leads_early_in_training_are_those_of_the_long_runs() -> None:
    """What is written by hand of short runs: the gap on the way, which has a tuned plain model."""
    page = (RESULTS / "pretraining.md").read_text("utf-8")
    lines = {line[1]: line for line in table(page, "| size | tokens per parameter | plain ends |")}

    def on_the_way(column: int) -> list[str]:
        return [
            lines[ratio][column].split()[0].removeprefix("−") for ratio in ("1.0", "2.0", "3.4")
        ]

    degree1, gfsa = on_the_way(5), on_the_way(7)
    by_hand = " ".join(page.partition("<!-- study")[0].split())
    assert (
        f"GFSA is {gfsa[0]}, {gfsa[1]} and {gfsa[2]} below plain after 1.0, 2.0 and 3.4" in by_hand
    )
    assert f"degree 1 {degree1[0]}, {degree1[1]} and {degree1[2]}." in by_hand
    assert f"ends at {lines['1.0'][2]} after 1.0, where its long runs are at" in by_hand
    assert f"long runs are at {lines['1.0'][3]}." in by_hand
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert (
        f"({gfsa[0]} nats after one token per parameter, {gfsa[2]} after 3.4; exploratory)"
        in readme
    )
    assert f"{degree1[0]}, {degree1[1]} and {degree1[2]} on the way of these runs" in readme
    first = (RESULTS / "README.md").read_text("utf-8")
    assert f"[{gfsa[0]} on the way after one token per parameter]" in first
    # what they are worth in steps of plain
    (worth,) = re.findall(r"degree 1 (\d+ % \([^)]*\)), GFSA (\d+ % \([^)]*\)),", page)
    assert f"GFSA is worth {worth[1]} more steps of plain, degree 1 {worth[0]}." in by_hand
    assert worth[0].replace(" % (", " % more steps (").replace(")", ", exploratory)") in readme


@pytest.mark.parametrize("name", PAGES)
def test_better_and_worse_are_verdicts_of_families_alone(name: str) -> None:
    page = (RESULTS / name).read_text("utf-8")
    if name == "README.md":
        page = page.partition("## Exploratory")[2]
    verdicts = {cell for line in page.splitlines() if line.startswith("|") for cell in cells(line)}
    assert not verdicts & {"better", "worse", "**better**", "**worse**"}


def test_families_came_before_their_rows() -> None:
    """By their dates and by git's history, where there is one."""
    tuning = read_folder_if_any(RESULTS / "tuning").every
    refuse_unregistered(read_families(RESULTS), read_folder(RESULTS).every, tuning)
