"""``gfsa results`` from rows to page, file and figure."""

import csv
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gfsa import cli
from gfsa_experiments.results.figures import draw, marks
from gfsa_experiments.results.load_rows import latest
from gfsa_experiments.results.page_blocks import (
    BEGIN,
    END,
    Bullets,
    Commands,
    Grid,
    Heading,
    Text,
    show,
    to_markdown,
)
from gfsa_experiments.results.page_sections import commands_of
from gfsa_experiments.results.tables import make_tables, titles
from gfsa_experiments.runs.row import append_rows
from support.result_rows import row, rows

HERE = Path(__file__).parent
COLA = [
    *rows("plain", [40.0, 41.0, 42.0, 43.0], seconds_per_step=0.05),
    *rows(
        "gfsa",
        [41.0, 42.1, 42.9, 44.2],
        options="K=4",
        added=72,
        moved=0.15,
        coefficients="0.1 0.95 0.02",
        seconds_per_step=0.07,
    ),
    *rows("contranorm", [40.5, 40.5, 42.5, 42.6], jobs=2),
]
ZINC = {"recipe": "graph", "task": "zinc gps", "metric": "mae", "higher_is_better": False}
GRAPHS = [
    *rows("plain", [0.20, 0.21, 0.22], settings="epochs=9", **ZINC),
    *rows("gfsa", [0.21, 0.2201, 0.2299], settings="epochs=9", **ZINC),
]


@pytest.fixture
def folder(tmp_path):
    append_rows(tmp_path / "glue.csv", COLA)
    append_rows(tmp_path / "graph.csv", GRAPHS)
    (tmp_path / "bench.csv").write_text("shape,ms\n1,2\n")
    return tmp_path


def run(folder, *arguments):
    return CliRunner().invoke(cli.build(), ["results", "--dir", str(folder), *map(str, arguments)])


def text_of(folder, *arguments):
    done = run(folder, *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def cells(text, *beginning):
    """The cells of the line that begins so."""
    start = "| " + " | ".join(beginning) + " |"
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_markdown(folder):
    text = text_of(folder)
    # differences 1.0, 1.1, 0.9, 1.2: mean 1.05, std 0.129, t(0.975, 3) = 3.182
    assert cells(text, "gfsa K=4", "4") == [
        *("gfsa K=4", "4", "42.5 ± 1.3", "+1.1 (+0.8 … +1.3)", "4/4", "<0.001", "suggestive"),
        *("–", "–", "–"),
    ]
    cola = text.partition("### graph")[0]
    assert cells(cola, "plain", "–", "0")[6:] == ["50 ms", "–", "–"]
    assert cells(text, "gfsa K=4", "–") == [
        *("gfsa K=4", "–", "72", "0.15", "0.100 0.950 0.020", "1.070", "1.40×", "–", "–"),
    ]
    # differences 0.5, −0.5, 0.5, −0.4: mean 0.025, std 0.55, interval ± 0.875
    assert cells(text, "contranorm", "4")[3:7] == [
        "+0.0 (−0.9 … +0.9)",
        "2/4",
        "0.933",
        "not shown",
    ]
    assert "### graph: zinc gps\n" in text
    assert "lower is better, 22.7M parameters, 5 epochs, 100 steps, NVIDIA H200, bf16. " in text
    assert "Settings: `epochs=9`, others by default." in text
    # a higher error speaks against the method
    assert cells(text, "gfsa", "3")[4:7] == ["0/3", "<0.001", "suggestive (against)"]
    assert "has 3 exploratory comparisons with plain, of which 2 exclude 0" in text
    # 3·0.0005 and 2·0.0003 are below 0.05
    assert "Holm's correction over all of them leaves 2." in text
    assert "gfsa train glue --method contranorm" in text
    assert "Paper" not in text


@pytest.mark.parametrize("second", [-0.2, 0.1])
def test_two_runs_from_scratch(tmp_path, second):
    """One comparison needs no correction, and c0 of either sign means nothing in particular."""
    learned = [
        row(method="gfsa", seed=seed, test=value, coefficients=f"{c0} 0.9 0.1", **ZINC)
        for seed, (value, c0) in enumerate([(0.19, -0.1), (0.21, second)])
    ]
    append_rows(tmp_path / "graph.csv", [*rows("plain", [0.20, 0.21], **ZINC), *learned])
    text = text_of(tmp_path)
    assert "exploratory comparisons with plain" not in text
    of_two = "in 2 of 2" if second < 0 else "in 1 of 2"
    assert f"The mean of c0 is negative {of_two} runs that learned it from scratch" in text
    assert ("the token itself taken out" in text) == (second < 0)


def test_better_and_worse_are_words_of_families(folder):
    tables = text_of(folder).partition("## Tables")[2].partition("### How to read")[0]
    assert not re.search(r"\| (better|worse) \|", tables)


def test_what_choices_are_made_by_and_the_second_pass(tmp_path):
    made = [*rows("plain", [50.0, 51.0], valid=40.0, commit="a", seconds=30.0, jobs=2)]
    made += rows("degree1", [50.5, 51.6], valid=41.0, commit="b")
    made += [row("gfsa", 0, 52.0, valid=42.0, commit="a"), row("gfsa", 1, 53.0, commit="b")]
    append_rows(tmp_path / "glue.csv", made)
    text = text_of(tmp_path)
    assert cells(text, "degree1", "2")[7:] == ["+1.00", "–", "0/2"]
    # one run of gfsa has no valid, and one pair is of one commit
    assert cells(text, "gfsa", "2")[7:] == ["–", "+1.45 (+0.81 … +2.09)", "1/2"]
    assert cells(text, "plain", "40.00")[-1] == "15"


def test_an_end_that_is_rounded_to_0_shows_on_which_side_it_is(tmp_path):
    made = rows("plain", [0.0, 10.0, 20.0, 30.0, 40.0])
    made += rows("gfsa", [1.06, 10.49, 23.99, 32.75, 40.8])
    append_rows(tmp_path / "glue.csv", made)
    line = cells(text_of(tmp_path), "gfsa", "5")
    assert line[3] == "+1.8 (−0.04 … +3.68)"
    assert line[6] == "not shown"


def test_titles_tell_apart_what_differs_and_no_more():
    settings = ["lr=1 epochs=3", "lr=2 epochs=3", "epochs=3"]
    made = [row("plain", settings=one) for one in settings] + [row(task="rte", settings="lr=1")]
    assert titles(make_tables(latest(made))) == [
        "cola minilm (otherwise)",
        "cola minilm (lr=1)",
        "cola minilm (lr=2)",
        "rte",
    ]


A, B = "9+1+2 aaaaaaaa", "9+1+2 bbbbbbbb"


def test_other_data_has_its_own_title_line_and_record(tmp_path):
    made = [*rows("plain", [50, 51, 52], data=A), *rows("gfsa", [51, 53, 54], data=A)]
    made += [*rows("plain", [10, 11, 12], data=B), *rows("gfsa", [9, 9, 11], data=B)]
    made += rows("plain", [1, 2], settings="lr=1", data=A)
    append_rows(tmp_path / "glue.csv", made)
    text = text_of(tmp_path, "--csv", tmp_path / "lines.csv")
    for data, difference in ((A, "+1.7"), (B, "−1.3")):
        title = f"cola minilm (otherwise, data {data})"
        part = text.partition(f"### glue: {title}\n")[2].partition("###")[0]
        assert cells(part, "gfsa", "3")[3].startswith(difference)
        assert f"not compared with these, which are on {data} (" in text
    # these settings ran on one
    assert "### glue: cola minilm (lr=1)\n" in text
    with (tmp_path / "lines.csv").open(newline="") as file:
        found = [(line["data"], line["method"], line["mean"]) for line in csv.DictReader(file)]
    assert (B, "plain", "11.0") in found
    assert (A, "plain", "51.0") in found


def test_the_first_page_chooses_no_best_of_several(folder):
    """Of several options the one with the usual rate counts, whatever its outcome; else none."""
    made = rows("gfsa", [30.0, 31.0, 32.5, 33.0], options="K=9")
    append_rows(folder / "glue.csv", made)
    assert "| GLUE, fine-tuned |" not in text_of(folder)
    append_rows(
        folder / "glue.csv", rows("gfsa", [40.0, 41.0, 42.0, 42.0], options="filter_lr=0.01")
    )
    # differences 0, 0, 0, −1 of an error of 58.5
    assert cells(text_of(folder), "GLUE, fine-tuned")[3].startswith("−0.4 % (")


def test_paper(folder):
    text = text_of(folder, "--paper")
    assert cells(text, "gfsa K=4", "4")[-1] == "+2.77"
    assert "| BERT-base (110M) | gfsa K=4 | matthews | 59.56 | +2.77 | – | – | Table 10 |" in text
    assert "| GPS | gfsa | mae ↓ | 0.0690 ± 0.0020 | −0.0010 | – | – | Table 6 |" in text
    assert text.count("**Paper, not measured here**") == 2


def test_filters(folder):
    text = text_of(folder, "--recipe", "glue", "--method", "gfsa").partition("## Tables")[2]
    assert "zinc" not in text
    assert "contranorm" not in text
    assert "zinc" in text_of(folder, "--task", "zin").partition("## Tables")[2]
    # what the whole folder says is not about a part of it
    assert "exploratory comparisons" not in text_of(folder, "--recipe", "glue")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "image"), "no exploratory run of recipe 'image'; there are glue, graph"),
        (("--task", "rte"), "no task with 'rte' in its name; there are cola minilm, zinc gps"),
        (("--method", "gfsa,nope"), "no run of method nope; there are contranorm, gfsa, plain"),
        (("--write", "--task", "zinc"), "--write makes the whole pages"),
        (("--family", "nope"), "there is no family 'nope'; there are none"),
        (("--plan", "x.txt"), "--plan writes the runs of a family; name it by --family"),
        (("--contrast", "gfsa"), "--contrast takes 'A - B', two lines of a table or of a family"),
        (("--contrast", "gfsa - plain", "--method", "gfsa"), "leave out --method"),
        (("--contrast", "gfsa - plain", "--recipe", "image"), "no exploratory run of recipe"),
        (("--family", "nope", "--contrast", "gfsa - plain"), "there is no family 'nope'"),
        (("--family", "nope", "--recipe", "glue"), "leave out --recipe, --task and --method"),
        (
            ("--family", "nope", "--plan", "x.txt", "--contrast", "gfsa - plain"),
            "--plan writes runs and --contrast compares them; leave one out",
        ),
        (("--contrast", "gfsa - nope"), "no task has both lines of 'gfsa - nope'"),
        (("--write", "--plot", "/elsewhere/x.svg"), "--plot has to be a file in"),
        (("--plot", "x.jpeg2"), "cannot write .jpeg2; known extensions: "),
        (("--dir", "/nowhere"), "there is no folder /nowhere"),
        (("--csv", str(HERE)), f"{HERE} is a folder; name a file in it"),
        (("--csv", f"{__file__}/lines.csv"), f"{__file__} is a file, not a folder"),
        (("--plot", f"{__file__}/figure.svg"), f"{__file__} is a file, not a folder"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(folder, arguments, message):
    done = run(folder, *arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("gfsa results: ")
    assert message in done.stderr


def test_csv_has_no_formulas(tmp_path):
    append_rows(tmp_path / "runs.csv", [*rows("plain", [50.0, 51.0]), row("=cmd|' /C calc'!A0")])
    text_of(tmp_path, "--csv", tmp_path / "lines.csv")
    assert ",'=cmd|" in (tmp_path / "lines.csv").read_text()


def test_csv_has_every_line_and_is_no_table_of_runs(folder):
    text_of(folder, "--csv", folder / "lines.csv", "--paper")
    with (folder / "lines.csv").open(newline="") as file:
        lines = {(line["task"], line["method"]): line for line in csv.DictReader(file)}
    assert len(lines) == 5
    gfsa = lines["cola minilm", "gfsa"]
    assert float(gfsa["difference"]) == pytest.approx(1.05)
    assert float(gfsa["low"]) == pytest.approx(0.8446, abs=1e-4)
    assert gfsa["verdict"] == "suggestive"
    assert gfsa["paper_not_measured"] == "+2.77 matthews (CoLA, BERT-base, Table 10)"
    assert lines["zinc gps", "plain"]["difference"] == ""
    # read again, it is left alone
    text_of(folder)


def test_plot_is_the_same_file_for_the_same_rows(folder):
    drawn = []
    for name in ("a.svg", "b.svg"):
        text_of(folder, "--plot", folder / name)
        drawn.append((folder / name).read_bytes())
    assert drawn[0] == drawn[1]
    text = drawn[0].decode()
    for words in ("GLUE, fine-tuned", "graphs", "GFSA, exploratory", "right is better"):
        assert words in text


def test_right_is_better_for_every_metric():
    drawn = marks(make_tables(latest(COLA + GRAPHS)))
    graphs, glue = ((mark.label, mark.method, mark.interval) for mark in drawn)
    # MAE rises by 0.01 of 0.21, so its error is not reduced
    assert graphs[:2] == ("graphs", "GFSA")
    assert graphs[2].mean == pytest.approx(-100 * 0.01 / 0.21, rel=1e-6)
    # Matthews' coefficient rises by 1.05 where 58.5 are missing
    assert glue[:2] == ("GLUE, fine-tuned", "GFSA")
    assert glue[2].low == pytest.approx(100 * 0.8446 / 58.5, abs=1e-3)
    axis = draw(drawn).axes[0]
    assert not axis.xaxis_inverted()
    assert [label.get_text() for label in axis.get_yticklabels()] == ["graphs", "GLUE, fine-tuned"]
    means = [line for line in axis.lines if line.get_marker() not in ("None", "")]
    assert {line.get_markerfacecolor() for line in means} == {"white"}


def test_nothing_to_plot(tmp_path):
    append_rows(tmp_path / "runs.csv", [row("gfsa")])
    done = run(tmp_path, "--plot", tmp_path / "x.png")
    assert done.exit_code == 1
    assert "no run can be compared with plain" in done.stderr
    assert not (tmp_path / "x.png").exists()


def test_write_begins_a_page_and_keeps_what_is_written_around(folder):
    page = folder / "README.md"
    done = run(folder, "--write", "--paper", "--plot", folder / "d.svg")
    assert done.exit_code == 0, done.output
    begun = page.read_text()
    assert begun.startswith(f"# Results\n\n{BEGIN}")
    assert "](d.svg)" in begun
    assert f"`gfsa results --write --dir {folder} --paper --plot {folder / 'd.svg'}`" in begun
    assert "[graphs](graph.md)" in begun
    assert (folder / "glue.md").read_text().startswith(f"# GLUE, fine-tuned\n\n{BEGIN}")

    page.write_text(f"Before, by hand.\n{begun}\nAfter, by hand.\n")
    run(folder, "--write")
    text = page.read_text()
    assert text.startswith("Before, by hand.\n# Results")
    assert text.endswith(f"{END}\n\nAfter, by hand.\n")
    assert "d.svg" not in text
    run(folder, "--write")
    assert page.read_text() == text


def test_a_command_is_found_without_an_entry_point(folder):
    command = [sys.executable, "-m", "gfsa_experiments", "results", "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == text_of(folder)


@pytest.mark.parametrize("page", ["no marks", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{END}"])
def test_write_refuses_a_page_without_its_marks(folder, page):
    (folder / "README.md").write_text(page)
    done = run(folder, "--write")
    assert done.exit_code == 1
    assert "Nothing was written" in done.stderr
    assert (folder / "README.md").read_text() == page
    # all pages or none
    assert not (folder / "glue.md").exists()


def test_damaged_rows_are_an_error_not_a_table(folder):
    with (folder / "glue.csv").open("a") as file:
        file.write("glue,cola\n")
    done = run(folder)
    assert done.exit_code == 1
    assert re.search(r"glue\.csv, line 14: expected \d+ columns, got 2", done.stderr)
    assert done.stdout == ""


BLOCKS = [
    Heading("Title"),
    Text("Some **bold** words."),
    Grid(("method", "score", "time"), [["a|b", "1.0", "–"], ["[red]c", "2.0", "–"]], ("method",)),
    Bullets(["*one*"]),
    Commands(["gfsa train x"]),
]


def test_blocks_in_markdown():
    text = to_markdown(BLOCKS)
    assert (
        "## Title\n\nSome **bold** words.\n\n| method | score | time |\n| --- | ---: | ---: |"
        in text
    )
    assert "| a\\|b | 1.0 | – |" in text
    assert "```\ngfsa train x\n```" in text


def test_blocks_in_a_terminal():
    console = Console(width=80, record=True, file=StringIO())
    show(BLOCKS, console)
    text = console.export_text()
    assert "Some bold words." in text
    assert "• one" in text
    # taken as they are, without markup; empty columns and commands are left out
    assert "[red]c" in text
    assert "time" not in text
    assert "gfsa train" not in text


def test_runs_that_differ_in_their_seed_alone_are_one_command():
    def command(method, seed):
        return f"gfsa train glue --method {method} --seeds {seed} --set lr=1"

    made = [row(m, seed=s, command=command(m, s)) for m in ("plain", "gfsa") for s in (1, 0, 11)]
    runs = latest([*made, row("plain", seed=3, command="")])
    assert commands_of(runs.rows) == [
        "gfsa train glue --method plain --seeds 0,1,11 --set lr=1",
        "gfsa train glue --method gfsa --seeds 0,1,11 --set lr=1",
    ]
