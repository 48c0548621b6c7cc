"""Folders with what belongs there, what does not, and what is broken."""

import csv
import os
import subprocess
import sys

import pytest

from gfsa_experiments.results.tables import read_folder, read_folder_if_any
from gfsa_experiments.runs.row import COLUMNS, Row, append_rows, read_rows
from support.result_rows import row, rows


@pytest.fixture
def folder(tmp_path):
    append_rows(tmp_path / "runs.csv", [*rows("plain", [50.0, 51.0]), row("gfsa", moved=0.5)])
    return tmp_path


def test_every_table_of_runs_is_read_and_no_other(folder):
    append_rows(folder / "more.csv", [row("degree1")])
    (folder / "bench.csv").write_text(
        "date,commit,command,device,torch,gfsa,shape\n1,2,3,4,5,6,7\n"
    )
    found = read_folder(folder)
    assert sorted(found.rows.method) == ["degree1", "gfsa", "plain", "plain"]
    assert found.replaced.empty


def test_tables_are_utf_8_on_every_machine(folder):
    """Of a device "2 × H200" others could not read the row, or it could not be written."""
    rewrite = """
import sys, pathlib
from gfsa_experiments.runs.row import append_rows, read_rows
table = pathlib.Path(sys.argv[1])
append_rows(table, read_rows(table))
"""
    table = folder / "table.csv"
    append_rows(table, [row("degree1", device="2 × H200")])
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", rewrite, str(table)]
    subprocess.run(command, env=os.environ | locale, check=True)
    assert [row.device for row in read_rows(table)] == ["2 × H200"] * 2


def test_a_byte_order_mark_is_no_part_of_the_header(folder):
    path = folder / "runs.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    append_rows(path, [row("degree1")])
    assert len(read_folder(folder).rows) == 4


def test_names_of_methods_cannot_command_a_terminal(folder):
    append_rows(folder / "runs.csv", [row("\x1b[2Jgfsa")])
    assert read_rows(folder / "runs.csv")[-1].method == "\\x1b[2Jgfsa"


def test_nothing_there(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no CSV file at all.*gfsa train"):
        read_folder(tmp_path)
    (tmp_path / "bench.csv").write_text("shape,ms\n1,2\n")
    with pytest.raises(ValueError, match=r"no rows of runs \(it has bench\.csv\)"):
        read_folder(tmp_path)


def test_a_folder_beside_it_may_have_nothing(tmp_path, folder):
    assert read_folder_if_any(tmp_path / "nowhere").every.empty
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "curves.csv").write_text("step,loss\n1,2\n")
    assert read_folder_if_any(tmp_path / "beside").every.empty
    assert len(read_folder_if_any(folder).every) == 3


def test_an_empty_file(folder):
    (folder / "broken.csv").write_text("")
    with pytest.raises(ValueError, match=r"broken\.csv is empty"):
        read_folder(folder)


def test_a_table_of_a_recipe_with_nothing_known_in_it(folder):
    (folder / "glue.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"glue\.csv.*not CSV"):
        read_folder(folder)


def test_missing_and_unknown_columns(folder):
    names = [name for name in COLUMNS if name != "moved"] + ["mood"]
    (folder / "broken.csv").write_text(",".join(names) + "\n")
    with pytest.raises(ValueError, match=r"broken\.csv.*missing: moved; unknown: mood"):
        read_folder(folder)


def test_a_line_cut_short(folder):
    path = folder / "runs.csv"
    path.write_text(path.read_text()[:-60])
    with pytest.raises(
        ValueError, match=rf"runs\.csv, line 4: expected {len(COLUMNS)} columns, got"
    ):
        read_folder(folder)


def test_a_line_cut_within_quotes(folder):
    append_rows(folder / "runs.csv", [row("x", command='gfsa train "a, b"')])
    path = folder / "runs.csv"
    path.write_text(path.read_text().rstrip()[:-4])
    with pytest.raises(ValueError, match=r"runs\.csv, after line 5: not CSV"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("column", "text", "expected"),
    [
        ("test", "high", "float"),
        ("seed", "1.5", "int"),
        ("higher_is_better", "yes", "bool"),
        ("moved", "far", r"float \| None"),
    ],
)
def test_a_value_of_the_wrong_type(folder, column, text, expected):
    path = folder / "runs.csv"
    with path.open(newline="") as file:
        lines = list(csv.reader(file))
    lines[2][COLUMNS.index(column)] = text
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    message = rf"runs\.csv, line 3, column {column}: expected {expected}, got '{text}'"
    with pytest.raises(ValueError, match=message):
        read_folder(folder)


def test_what_is_written_comes_back(folder):
    found = read_folder(folder).rows
    (gfsa,) = found[found.method == "gfsa"][COLUMNS].to_dict("records")
    # missing numbers are NaN in a data frame
    assert Row(**{k: None if v != v else v for k, v in gfsa.items()}) == row("gfsa", moved=0.5)
