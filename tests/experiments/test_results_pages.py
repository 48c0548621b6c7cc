"""The committed pages: made from the rows alone, short, and in agreement with each other."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path

import matplotlib
import pytest
from support.quoted_figures import FIGURES
from typer.testing import CliRunner

from gfsa import cli
from gfsa_experiments.results.families import is_of, read_families, refuse_unregistered
from gfsa_experiments.results.family_summary import is_complete
from gfsa_experiments.results.figures import draw, marks
from gfsa_experiments.results.load_rows import read_folder, read_folder_if_any
from gfsa_experiments.results.page_blocks import BEGIN, END
from gfsa_experiments.results.verdicts import outcomes

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
    of_all = {"README.md", "families.md", "exploratory.md"}
    assert {f"{recipe}.md" for recipe in recipes} | of_all == set(PAGES)


def test_the_first_page_is_one_screen() -> None:
    """With room for the comparisons of the families that may still be run, a line for each."""
    page = (RESULTS / "README.md").read_text("utf-8")
    rows = read_folder(RESULTS).rows
    judged = [outcomes(f, rows) for f in read_families(RESULTS) if not f.withdrawn]
    planned = sum(len(found) for found in judged if not is_complete(found))
    assert len(page.splitlines()) + planned < 70
    answer = page.partition("\n\n")[2].partition("\n\n")[0]
    assert len(answer.splitlines()) == 3
    # a line of source may be long, a screen is not
    assert max(map(len, answer.splitlines())) < 420
    assert len(page) + 90 * planned < 8000


_WIKITEXT2 = "WikiText-2, 8.5M parameters"
_PRETRAINING = "pretraining, 15M, 3.4 tokens per parameter, lr 4e-3"
_LONGER = "pretraining, 15M, 10 tokens per parameter, lr 2e-3"
# its first two columns, and the family and comparison
TABLE_OF_README = {
    (_WIKITEXT2, "GFSA − plain"): ("wikitext2-featscale", "gfsa − plain"),
    (_WIKITEXT2, "GFSA − plain for its time (11 epochs)"): (
        "wikitext2-featscale",
        "gfsa − longer",
    ),
    (_WIKITEXT2, "GFSA − FeatScale, the best of five peers"): (
        "wikitext2-featscale",
        "gfsa − featscale",
    ),
    (_PRETRAINING, "degree 1 − plain"): ("pretrain-epoch-best", "degree1 − plain"),
    (_PRETRAINING, "degree 1 on gated heads − gated heads"): (
        "pretrain-epoch-best",
        "both − gated",
    ),
    (_PRETRAINING, "degree 1 − gated heads"): ("pretrain-epoch-best", "degree1 − gated"),
    (_LONGER, "degree 1 − plain"): ("pretrain", "degree1 − plain"),
    ("fine-tuned: STS-B, test set", "identity term − plain"): ("stsb", "w0 − plain"),
}


def test_no_text_of_the_forest_plot_is_cut_off() -> None:
    figure = draw(marks(FIGURES.tables, FIGURES.complete))
    figure.draw_without_rendering()
    width = figure.bbox.width
    texts = [text for axis in figure.axes for text in (*axis.texts, *axis.get_yticklabels())]
    for text in texts:
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width, text.get_text()


def test_the_readme_agrees_with_the_pages() -> None:
    """A table of at most eight lines; a number that differs is copied from that of the results."""
    readme = (ROOT / "README.md").read_text("utf-8")
    page = (RESULTS / "README.md").read_text("utf-8")
    shown = table(readme, "| setting | comparison |")
    for above, line in pairwise(shown):
        line[0] = line[0] or above[0]
    assert [(line[0], line[1]) for line in shown] == [*TABLE_OF_README]
    assert len(shown) <= 8
    judged = {(line[0], line[1]): line for line in table(page, "| family | comparison |")}
    header = cells(next(x for x in page.splitlines() if x.startswith("| family | comparison |")))
    columns = [header.index(name) for name in ("difference", "error reduction", "verdict")]
    for line in shown:
        found = judged[TABLE_OF_README[line[0], line[1]]]
        assert line[2:] == [found[at] for at in columns]


def test_what_the_readme_says_of_domains_is_what_their_intervals_say() -> None:
    """Degree 1 and GFSA against plain, on the page of exploratory results."""
    explored = (RESULTS / "exploratory.md").read_text("utf-8")
    found = {line[0]: line[3:5] for line in table(explored, "| domain | tasks |")}
    # a family has its model, tuned
    del found["language modelling"]
    suggestive = {name: ["suggestive" in cell for cell in own] for name, own in found.items()}
    assert {name: own for name, own in suggestive.items() if any(own)} == {
        "images": [True, True],
        "long sequences": [True, False],
    }
    others = {name for name, own in suggestive.items() if not any(own)}
    assert others == {"graphs", "code clones", "speech", "GLUE, fine-tuned"}
    assert "Holm's correction over all of them leaves 0." in explored
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert (
        "images (both filters) and long sequences (degree 1) have intervals above 0, and no "
        "comparison is left after correction. Graphs, code clones, speech and GLUE: no difference"
    ) in readme


def test_leads_by_length_are_those_of_runs_with_a_tuned_plain_model() -> None:
    """What is written by hand of the gap by tokens per parameter."""
    details = (RESULTS / "pretraining-details.md").read_text("utf-8")
    lines = table(details, "| size | tokens | tokens per parameter |")
    own = [line for line in lines if line[0] == "15M"]
    assert [line[2] for line in own] == ["1.0", "2.0", "3.4", "10.2"]  # none of them marked
    degree1, gfsa = ([line[at].split()[0].removeprefix("−") for line in own] for at in (5, 6))
    pairs = [line[3] for line in own]
    by_hand = " ".join(details.partition("<!-- study of pretraining: end -->")[2].split())
    first = " ".join((RESULTS / "pretraining.md").read_text("utf-8").split())
    assert f"degree 1 ends {_listed(degree1)} below plain after 1.0, 2.0, 3.4 and 10.2" in first
    assert f"It ends {_listed(degree1)} nats below plain after 1.0, 2.0, 3.4 and 10.2" in by_hand
    assert f"({_listed(pairs)} seeds)" in by_hand
    assert f"GFSA ends {_listed(gfsa)} nats below plain at these lengths" in by_hand


def test_what_degree_1_is_worth_in_steps_is_what_the_details_say() -> None:
    """By the ends of runs, at 3.4 tokens a parameter."""
    (share,) = re.findall(
        r"degree 1 (?:reaches|is at).*?after [\d.]+ and 3\.4 tokens .*? takes \d+ and (\d+) %",
        (RESULTS / "pretraining-details.md").read_text("utf-8"),
    )
    page = (RESULTS / "pretraining.md").read_text("utf-8")
    steps = f"{100 * (100 / int(share) - 1):.0f} % more steps at 3.4"
    assert f"by estimate that is worth {steps}" in page


def test_leads_by_rate_are_those_of_the_table() -> None:
    """What is written by hand of higher rates, with the longest warm-up of every arm."""
    details = (RESULTS / "pretraining-details.md").read_text("utf-8")
    lines = [
        line[1:] for line in table(details, "| tokens per parameter | lr |") if line[0] == "3.4"
    ]
    rates = {float(line[0]): line[2:5] for line in lines if line[1] == "401"}
    assert list(rates) == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3], "say what the others show"
    plain, *filtered = zip(*rates.values(), strict=True)
    page = " ".join(details.split())
    for name, losses in zip(("Degree 1 − plain is", "GFSA − plain"), filtered, strict=True):
        said = re.search(rf"{name} ((?:[+−\d.]+, )+[+−\d.]+ and [+−\d.]+)", page)
        assert said is not None
        gaps = [float(x.replace("−", "-")) for x in re.split(", | and ", said[1])]
        # the table's losses are rounded, the differences are not
        found = [float(a) - float(b) for a, b in zip(losses, plain, strict=True)]
        assert gaps == pytest.approx(found, abs=1.1e-3)


def _listed(values: list[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


@pytest.mark.parametrize("name", sorted({*PAGES} - {"README.md", "families.md"}))
def test_better_and_worse_are_verdicts_of_families_alone(name: str) -> None:
    page = (RESULTS / name).read_text("utf-8")
    verdicts = {cell for line in page.splitlines() if line.startswith("|") for cell in cells(line)}
    assert not verdicts & {"better", "worse", "**better**", "**worse**"}


def test_families_came_before_their_rows() -> None:
    """By their dates and by git's history, where there is one."""
    tuning = read_folder_if_any(RESULTS / "tuning").every
    refuse_unregistered(read_families(RESULTS), read_folder(RESULTS).every, tuning)
