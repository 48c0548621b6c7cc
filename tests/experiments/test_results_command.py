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
from gfsa_experiments.results.figures import draw
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
from gfsa_experiments.results.summary import titles
from gfsa_experiments.results.tables import make_tables
from gfsa_experiments.runs.row import append_rows
from support.result_rows import row, rows

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
    assert cells(text, "plain", "4", "41.5 ± 1.3")[8:] == ["–", "–", "50 ms", "–"]
    # differences 1.0, 1.1, 0.9, 1.2: mean 1.05, std 0.129, t(0.975, 3) = 3.182
    assert cells(text, "gfsa K=4") == [
        *("gfsa K=4", "4", "42.5 ± 1.3", "+1.1 (+0.8 … +1.3)", "4/4", "0.001", "better"),
        *("72", "0.15", "0.100 0.950 0.020", "1.40×", "–"),
    ]
    # differences 0.5, −0.5, 0.5, −0.4: mean 0.025, std 0.55, interval ± 0.875
    assert cells(text, "contranorm")[3:7] == [
        "+0.0 (−0.9 … +0.9)",
        "2/4",
        "0.933",
        "no difference shown",
    ]
    assert "### zinc gps\n" in text
    assert "lower is better, 22.7M parameters, 5 epochs, 100 steps, NVIDIA H200, bf16. " in text
    assert "Settings: `epochs=9`, others by default." in text
    # a higher error is worse
    assert cells(text, "gfsa", "3")[4:7] == ["0/3", "<0.001", "worse"]
    assert "The folder has 3 such comparisons, of which 2 exclude 0" in text
    assert "gfsa train glue --method contranorm" in text
    assert "Paper" not in text


def test_what_choices_are_made_by_is_shown_where_it_is_known(folder):
    assert "| valid |" not in text_of(folder)
    append_rows(folder / "glue.csv", rows("degree1", [1.0, 2.0], valid=40.26, settings="lr=1"))
    text = text_of(folder, "--method", "degree1")
    assert cells(text, "degree1", "2")[:4] == ["degree1", "2", "1.50 ± 0.71", "40.26"]


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


def test_other_data_has_its_own_title_line_panel_and_record(tmp_path):
    made = [*rows("plain", [50, 51, 52], data=A), *rows("gfsa", [51, 53, 54], data=A)]
    made += [*rows("plain", [10, 11, 12], data=B), *rows("gfsa", [9, 9, 11], data=B)]
    made += rows("plain", [1, 2], settings="lr=1", data=A)
    append_rows(tmp_path / "glue.csv", made)
    text = text_of(tmp_path, "--plot", tmp_path / "d.svg", "--csv", tmp_path / "lines.csv")
    for data, difference in ((A, "+1.7"), (B, "−1.3")):
        title = f"cola minilm (otherwise, data {data})"
        assert f"### {title}\n" in text
        line = cells(text, f"glue: {title}, matthews", "22.7M parameters, 5 epochs", "gfsa")
        assert line[4].startswith(difference)
        assert f"not compared with these, which are on {data} (" in text
        assert data in " ".join((tmp_path / "d.svg").read_text().split())
    # these settings ran on one
    assert "### cola minilm (lr=1)\n" in text
    with (tmp_path / "lines.csv").open(newline="") as file:
        found = [(line["data"], line["method"], line["mean"]) for line in csv.DictReader(file)]
    assert (B, "plain", "11.0") in found
    assert (A, "plain", "51.0") in found


def test_summary_gives_no_best_of_several(folder):
    append_rows(folder / "glue.csv", rows("gfsa", [30.0, 31.0, 32.5, 33.0], options="K=9"))
    line = cells(
        text_of(folder, "--paper"),
        "glue: cola minilm, matthews",
        "22.7M parameters, 5 epochs",
        "gfsa, 2 choices of options",
    )
    assert line[3:] == ["4", "−9.9 to +1.1", "+2.35 … +3.77", "1 better, 1 worse"]


def test_summary_compares_with_the_same_options(folder):
    line = cells(
        text_of(folder, "--paper"),
        "glue: cola minilm, matthews",
        "22.7M parameters, 5 epochs",
        "gfsa K=4",
    )
    assert line[5] == "+2.77"


def test_paper(folder):
    text = text_of(folder, "--paper")
    assert cells(text, "gfsa K=4")[-1] == "+2.77"
    assert "| BERT-base (110M) | gfsa K=4 | matthews | 59.56 | +2.77 | – | – | Table 10 |" in text
    assert "| GPS | gfsa | mae ↓ | 0.0690 ± 0.0020 | −0.0010 | – | – | Table 6 |" in text
    assert text.count("**Paper, not measured here**") == 2


def test_filters(folder):
    text = text_of(folder, "--recipe", "glue", "--method", "gfsa")
    assert "zinc" not in text
    assert "contranorm" not in text
    # what is left out still counts among the comparisons: alone, p would be 0.0005
    assert cells(text, "gfsa K=4")[5] == "0.001"
    assert "The folder has 3 such comparisons" in text
    assert "zinc" in text_of(folder, "--task", "zin")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "image"), "no run of recipe 'image'; there are glue, graph"),
        (("--task", "rte"), "no task with 'rte' in its name; there are cola minilm, zinc gps"),
        (("--method", "gfsa,nope"), "no run of method nope; there are contranorm, gfsa, plain"),
        (("--write", "--task", "zinc"), "--write makes the whole page"),
        (("--write", "--plot", "/elsewhere/x.svg"), "--plot has to be a file in"),
        (("--plot", "x.jpeg2"), "cannot write .jpeg2; known extensions: "),
        (("--dir", "/nowhere"), "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(folder, arguments, message):
    done = run(folder, *arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("gfsa results: ")
    assert message in done.stderr


def test_csv_has_every_line_and_is_no_table_of_runs(folder):
    text_of(folder, "--csv", folder / "lines.csv", "--paper")
    with (folder / "lines.csv").open(newline="") as file:
        lines = {(line["task"], line["method"]): line for line in csv.DictReader(file)}
    assert len(lines) == 5
    gfsa = lines["cola minilm", "gfsa"]
    assert float(gfsa["difference"]) == pytest.approx(1.05)
    assert float(gfsa["low"]) == pytest.approx(0.8446, abs=1e-4)
    assert gfsa["verdict"] == "better"
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
    for words in ("glue: cola minilm", "graph: zinc gps", "gfsa K=4", "right is better"):
        assert words in text


def test_right_is_better_in_every_panel():
    cola, zinc = draw(make_tables(latest(COLA + GRAPHS))).axes
    assert not cola.xaxis_inverted()
    assert zinc.xaxis_inverted()
    assert [label.get_text() for label in cola.get_yticklabels()] == ["contranorm", "gfsa K=4"]
    bars = {tuple(line.get_xdata()) for line in cola.lines if line.get_linewidth() == 2}
    assert any(low == pytest.approx(0.8446, abs=1e-4) for low, _ in bars)


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

    page.write_text(f"Before, by hand.\n{begun}\nAfter, by hand.\n")
    run(folder, "--write")
    text = page.read_text()
    assert text.startswith("Before, by hand.\n# Results")
    assert text.endswith(f"{END}\n\nAfter, by hand.\n")
    assert "d.svg" not in text
    run(folder, "--write")
    assert page.read_text() == text


def test_the_page_of_this_repository_is_made_from_its_rows(tmp_path):
    """To the byte: what ``gfsa results --write`` would put between the marks is there already."""
    ours = Path(__file__).parents[2] / "results"
    for table in ours.glob("*.csv"):
        (tmp_path / table.name).write_bytes(table.read_bytes())
    page = (ours / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(page, encoding="utf-8")
    done = run(tmp_path, "--write", "--paper", "--plot", tmp_path / "differences.svg")
    assert done.exit_code == 0, done.output
    # the command names the folder
    made = (tmp_path / "README.md").read_text(encoding="utf-8")
    made = made.replace(f" --dir {tmp_path}", "").replace(str(tmp_path), "results")
    assert made == page


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
