"""``gfsa results`` from rows to page, file and figure."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gfsa import cli
from gfsa_experiments.results.report import draw, marks
from gfsa_experiments.results.tables import frame_of, make_tables
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
    assert cells(text, "", "gfsa K=4")[2:] == [
        *("4", "42.5 ± 1.3", "+1.1 (+0.8 … +1.3)", "suggestive", "0.100 0.950 0.020"),
    ]
    # differences 0.5, −0.5, 0.5, −0.4: mean 0.025, std 0.55, interval ± 0.875
    found = cells(text, "", "contranorm")
    assert found[4:6] == ["+0.0 (−0.9 … +0.9)", "not shown"]
    assert "| graph: zinc gps, mae ↓ | plain |" in text
    # a higher error speaks against the method
    assert cells(text, "", "gfsa", "3")[5] == "suggestive (against)"
    # a folder without families answers in words
    assert "- cola minilm: gfsa K=4 is better than plain: +1.1 (+0.8 … +1.3) matthews" in text
    assert "zinc gps: gfsa is worse than plain" in text
    # 3·0.0005 and 2·0.0003 are below 0.05
    text = text_of(folder, "--show", "overall")
    assert "Of 3 exploratory comparisons with plain 2 exclude 0" in text
    assert "Holm's correction over all of them leaves 2." in text


def test_constant_answers_are_noticed(tmp_path):
    append_rows(tmp_path / "glue.csv", rows("plain", [50.0, 50.0]) + rows("gfsa", [50.0, 50.0]))
    text = text_of(tmp_path)
    assert "every run has matthews 50: the models may predict one" in text
    assert "gfsa ends exactly where plain does" in text


def test_lines_are_compared_with_another_than_plain(folder):
    """By its method or its whole name; plain is shown if it is asked for."""
    text = text_of(folder, "--against", "contranorm", "--method", "gfsa K=4")
    # differences 0.5, 1.6, 0.4, 1.6
    assert "difference to contranorm" in text
    assert cells(text, "glue: cola minilm, matthews", "contranorm")[4] == "–"
    assert cells(text, "", "gfsa K=4")[4] == "+1.0 (−0.03 … +2.08)"
    assert "| plain |" not in text
    assert "cola minilm: gfsa K=4 shows no difference to contranorm" in text
    text = text_of(folder, "--against", "gfsa K=4", "--show", "tables")
    assert cells(text, "glue: cola minilm, matthews", "plain")[4].startswith("−1.1 (")
    assert "zinc gps: no run of gfsa K=4 with these settings, so no difference." in text


def test_filters(folder):
    text = text_of(folder, "--recipe", "glue", "--method", "gfsa")
    assert "zinc" not in text
    assert "contranorm" not in text
    assert "zinc" in text_of(folder, "--task", "zin")
    # a line may be named with its options; what the whole folder says is not about a part of it
    text = text_of(folder, "--method", "gfsa K=4")
    assert "zinc" not in text
    assert "exploratory comparisons with plain" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "image"), "no exploratory run of such a task; there are glue: cola"),
        (("--task", "rte"), "no exploratory run of such a task; there are glue: cola"),
        (
            ("--method", "gfsa,nope"),
            "no run of method nope; there are contranorm, gfsa,",
        ),
        (("--write", "--task", "zinc"), "--write makes whole pages"),
        (("--family", "nope"), "there is no family 'nope'; there are none"),
        (("--plan", "x.txt"), "--plan writes the runs of a family; name it by --family"),
        (("--against", "nope"), "no run of method nope; there are contranorm, gfsa,"),
        (("--against", "gfsa", "--show", "overall"), "leave out --show overall"),
        (("--show", "all"), "--show takes verdicts, tables, overall"),
        (("--family", "nope", "--recipe", "glue"), "leave out --recipe, --task, --method and"),
        (("--plot", "x.jpeg2"), "cannot write .jpeg2; known extensions: "),
        (("--dir", "/nowhere"), "/nowhere has no rows of runs (it has no CSV file)"),
        (("--plot", str(HERE)), f"{HERE} is a folder; name a file in it"),
        (("--plot", f"{__file__}/figure.svg"), f"{__file__} is a file, not a folder"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(folder, arguments, message):
    done = run(folder, *arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("gfsa results: ")
    assert message in done.stderr


def test_plot_is_the_same_file_for_the_same_rows(folder):
    for name in ("a.svg", "b.svg"):
        text_of(folder, "--plot", folder / name)
    text = (folder / "a.svg").read_text()
    assert text == (folder / "b.svg").read_text()
    for words in ("glue: cola minilm", "gfsa K=4", "suggestive", "right is better"):
        assert words in text


def test_right_is_better_for_every_metric():
    drawn = {m.group: m for m in marks(make_tables(frame_of(COLA + GRAPHS))) if "gfsa" in m.label}
    graphs, glue = drawn["graph: zinc gps (mae)"], drawn["glue: cola minilm (matthews)"]
    # MAE rises by 0.01 of 0.21, so its error is not reduced
    assert graphs.interval.mean == pytest.approx(-100 * 0.01 / 0.21, rel=1e-6)
    # Matthews' coefficient rises by 1.05 where 58.5 are missing
    assert glue.interval.low == pytest.approx(100 * 0.8446 / 58.5, abs=1e-3)
    assert not graphs.is_registered
    axis = draw([graphs, glue]).axes[0]
    assert not axis.xaxis_inverted()
    assert [label.get_text() for label in axis.get_yticklabels()] == [graphs.label, glue.label]
    means = [line for line in axis.lines if line.get_marker() not in ("None", "")]
    assert {line.get_markerfacecolor() for line in means} == {"white"}


def test_nothing_to_plot(tmp_path):
    append_rows(tmp_path / "runs.csv", [row("gfsa")])
    done = run(tmp_path, "--plot", tmp_path / "x.png")
    assert done.exit_code == 1
    assert "no run can be compared with plain" in done.stderr
    assert not (tmp_path / "x.png").exists()


MARK = "<!-- gfsa results --show tables -->"
END = "<!-- end -->"


def test_the_speed_of_a_suite_is_its_latest_measurement_on_a_gpu(folder):
    lines = [
        "date,commit,cuda,suite,timing,shape,variant,fwd_ms,fwd_bwd_ms,fwd_ratio,fwd_bwd_ratio",
        "2026-01-01,a1,13.0,ops,graph,1x2x3x4,plain,1.0,2.0,1,1",
        "2026-01-01,a1,13.0,ops,graph,1x2x3x4,gfsa degree 1,1.0,2.0,1.1,1.2",
        "2026-01-01,a1,13.0,ops,graph,1x2x3x4,gfsa,1.0,2.0,1.7,1.8",
        "2026-01-02,b2,13.0,ops,graph,1x2x3x4,plain,1.0,2.5,1,1",
        "2026-01-02,b2,13.0,ops,graph,1x2x3x4,gfsa,1.0,2.0,1.5,1.6",
        "2026-01-03,c3,,ops,graph,1x2x3x4,plain,9.0,9.0,1,1",
        "2026-01-03,c3,,ops,graph,1x2x3x4,gfsa,9.0,9.0,9.9,9.9",
        "2026-01-01,a1,13.0,decode,eager,5x6x7x8,plain,4.0,,1,",
        "2026-01-01,a1,13.0,decode,eager,5x6x7x8,gfsa kernel,4.0,,1.05,",
    ]
    (folder / "bench.csv").write_text("\n".join(lines) + "\n")
    text = text_of(folder, "--show", "speed", "--recipe", "ops", "--task", "graph")
    assert text.startswith("| shape |")
    found = ["1x2x3x4", "2.5", "1.20×/1.10×", "1.60×/1.50×", "a1, b2"]
    assert f"| {' | '.join(found)} |" in text
    one = text_of(folder, "--show", "speed", "--recipe", "decode", "--task", "eager")
    assert cells(one, "5x6x7x8") == ["5x6x7x8", "4", "1.05×", "a1"]
    assert "1x2x3x4" not in one
    done = run(folder, "--show", "speed", "--recipe", "prefill")
    assert done.exit_code == 1
    assert "it has decode eager, ops graph" in done.stderr


def test_write_begins_a_page_and_keeps_what_is_written_around(folder):
    page = folder / "README.md"
    assert run(folder, "--write").exit_code == 0
    begun = page.read_text()
    assert begun.startswith("# Results\n\n<!-- gfsa results --show verdicts -->")
    assert "| glue: cola minilm" in begun
    other = folder / "other.md"
    other.write_text(f"Before.\n{MARK}\nold\n{END}\nAfter.\n")
    page.write_text(f"Before, by hand.\n{begun}\nAfter, by hand.\n")
    run(folder, "--write")
    text = page.read_text()
    assert text == f"Before, by hand.\n{begun}\nAfter, by hand.\n"
    assert other.read_text().startswith(f"Before.\n{MARK}\n\n| task |")
    assert other.read_text().endswith(f"{END}\nAfter.\n")
    run(folder, "--write")
    assert page.read_text() == text


@pytest.mark.parametrize(
    "page", [MARK, f"{END}\n{MARK}", f"{MARK}{END}{END}", f"<!-- gfsa results --nope x -->{END}"]
)
def test_write_refuses_a_page_with_wrong_marks(folder, page):
    other = f"{MARK}\n{END}\n"
    (folder / "a.md").write_text(other)
    (folder / "README.md").write_text(page)
    done = run(folder, "--write")
    assert done.exit_code == 1
    assert "mark" in done.stderr
    # all pages or none
    assert (folder / "README.md").read_text() == page
    assert (folder / "a.md").read_text() == other


def test_the_pages_of_this_repository_are_those_of_its_rows(tmp_path):
    """Regenerating changes nothing, in a folder without any history."""
    root = HERE.parents[1]
    shutil.copytree(root / "results", tmp_path / "results")
    shutil.copy(root / "README.md", tmp_path)
    text_of(tmp_path / "results", "--write")
    assert (tmp_path / "README.md").read_text() == (root / "README.md").read_text()
    for path in sorted((root / "results").glob("*.md")):
        assert (tmp_path / "results" / path.name).read_text() == path.read_text(), path.name
