"""From folders of rows to tables: reading, statistics, pairs and averages."""

import csv
import math

import pytest

from gfsa_experiments.results.report import interval, notes_of, titles
from gfsa_experiments.results.statistics import Interval, contrast, holm, paired_difference
from gfsa_experiments.results.tables import frame_of, make_tables, read_folder
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
    assert sorted(found.method) == ["degree1", "gfsa", "plain", "plain"]
    assert not found.replaced.any()


def test_names_of_methods_cannot_command_a_terminal(folder):
    append_rows(folder / "runs.csv", [row("\x1b[2Jgfsa")])
    assert read_rows(folder / "runs.csv")[-1].method == "\\x1b[2Jgfsa"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (
            ",".join([n for n in COLUMNS if n != "moved"] + ["mood"]),
            "missing: moved; unknown: mood",
        ),
        (",".join(COLUMNS) + "\nglue,cola\n", f"line 2: expected {len(COLUMNS)} columns, got 2"),
    ],
)
def test_a_damaged_table(folder, text, message):
    (folder / "broken.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"broken\.csv.*{message}"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("column", "text", "expected"),
    [
        ("test", "high", "of type float"),
        ("test", "", "of type float"),
        ("seed", "1.5", "of type int"),
        ("higher_is_better", "maybe", "true or false"),
        ("moved", "far", "of type float"),
    ],
)
def test_a_value_of_the_wrong_type(folder, column, text, expected):
    path = folder / "runs.csv"
    with path.open(newline="") as file:
        lines = list(csv.reader(file))
    lines[2][COLUMNS.index(column)] = text
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    message = rf"runs\.csv, line 3: {column} must be {expected}, got '{text}'"
    with pytest.raises(ValueError, match=message):
        read_folder(folder)


def test_what_is_written_comes_back(folder):
    found = read_folder(folder)
    (gfsa,) = found[found.method == "gfsa"][COLUMNS].to_dict("records")
    # missing numbers are NaN in a data frame
    assert Row(**{k: None if v != v else v for k, v in gfsa.items()}) == row("gfsa", moved=0.5)


def seeded(values):
    return dict(enumerate(values))


def test_interval_worked_by_hand():
    # differences 1, 2, 3: mean 2, std 1, t(0.975, 2) = 4.302653
    found = paired_difference(seeded([10, 20, 30]), seeded([11, 22, 33]), higher_is_better=True)
    assert found.values == (1, 2, 3)
    assert found.mean == 2
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    # t = 2·√3 with 2 degrees of freedom: p = 1 − t/√(2 + t²)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-9)
    assert found.verdict == "no difference shown"


@pytest.mark.parametrize(
    ("change", "higher", "verdict", "better"),
    [
        (+1, True, "better", 4),
        (-1, True, "worse", 0),
        (+1, False, "worse", 0),
        (-1, False, "better", 4),
    ],
)
def test_direction_of_the_metric(change, higher, verdict, better):
    plain = seeded([10.0, 11.0, 12.0, 13.0])
    method = {seed: value + change + 0.01 * seed for seed, value in plain.items()}
    found = paired_difference(plain, method, higher)
    assert found.verdict == verdict
    assert found.seeds_better == better
    assert found.mean == pytest.approx(change + 0.015)


def test_only_seeds_that_both_have_are_paired():
    plain = {0: 1.0, 1: 2.0, 7: 100.0}
    method = {1: 2.5, 0: 1.25, 9: -100.0}
    found = paired_difference(plain, method, higher_is_better=True)
    assert found.seeds == (0, 1)
    assert found.values == (0.25, 0.5)
    assert paired_difference({0: 1.0}, {1: 1.0}, higher_is_better=True) is None


def test_one_seed_has_no_interval():
    found = paired_difference({3: 1.0}, {3: 2.0}, higher_is_better=True)
    assert (found.low, found.high, found.p, found.verdict) == (None, None, None, None)
    assert found.mean == 1.0


def test_equal_differences_give_no_interval_of_width_zero():
    # 0.1 + 0.2 − 0.2 and the like differ in the last digit only
    plain = seeded([0.1, 0.3, 0.7])
    method = {seed: value + 0.2 for seed, value in plain.items()}
    assert len({method[s] - plain[s] for s in plain}) > 1
    assert paired_difference(plain, method, higher_is_better=True).verdict is None


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Interval(0.7, 0.41, 0.99), "+0.7 (+0.4 … +1.0)"),
        (Interval(1.0, -0.03, 2.08), "+1.0 (−0.03 … +2.08)"),
        # a mean is not printed outside of its interval
        (Interval(0.04, 0.004, 0.076), "+0.040 (+0.004 … +0.076)"),
        (Interval(0.04), "+0.0"),
    ],
)
def test_an_interval_has_the_digits_that_its_ends_need(found, text):
    assert interval(found, 1) == text


def test_holm_worked_by_hand():
    # sorted: 0.005·4, 0.01·3, 0.03·2, then 0.04·1 held up to the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def contrast_of(ours, theirs, **others):
    return contrast(frame_of(rows("gfsa", ours, **others)), frame_of(rows("a", theirs, **others)))


def test_the_reduction_is_a_share_of_the_error():
    found = contrast_of([51.0, 52.0, 54.5], [50.0, 51.5, 52.0])
    # differences 1, 0.5, 2.5 of an error of 100 − 51.1667
    assert found.reduction.mean == pytest.approx(100 * (4 / 3) / (100 - 153.5 / 3))
    assert found.reduction.low < found.reduction.mean < found.reduction.high
    # there is no error to reduce
    perfect = contrast_of([99.0, 98.0], [100.0, 100.0])
    assert perfect.reduction is None
    assert perfect.test.mean == -1.5


def test_a_loss_in_nats_is_reduced_as_its_perplexity():
    """1 − exp(difference), whatever the loss is."""
    nats = {"metric": "loss", "higher_is_better": False}
    found = contrast_of([1.95, 1.97, 1.96], [1.98, 1.98, 1.99], **nats)
    assert found.reduced == "perplexity"
    ends = (found.test.mean, found.test.high, found.test.low)
    reduced = (found.reduction.mean, found.reduction.low, found.reduction.high)
    assert reduced == pytest.approx([100 * (1 - math.exp(end)) for end in ends])


def test_a_failed_run_is_no_pair():
    found = contrast_of([51.0, math.nan, 53.0], [50.0, 51.5, 52.0])
    assert found.test.seeds == (0, 2)
    assert contrast(frame_of([row("gfsa", 7)]), frame_of([row("plain", 0)])) is None


def table_of(made):
    (table,) = make_tables(frame_of(made))
    return table


def line_of(table, name):
    (line,) = [line for line in table.lines if line.name == name]
    return line


def test_a_table_for_each_task_and_settings():
    made = [
        *rows("plain", [50, 51]),
        *rows("gfsa", [52, 53]),
        *rows("plain", [60, 61], settings="epochs=3"),
        *rows("plain", [70], task="rte minilm", metric="accuracy"),
    ]
    tables = make_tables(frame_of(made))
    assert [(table.task, table.settings) for table in tables] == [
        ("cola minilm", ""),
        ("cola minilm", "epochs=3"),
        ("rte minilm", ""),
    ]
    # never paired over settings
    assert line_of(tables[0], "gfsa").to_reference.test.values == (2, 2)


def test_without_plain_there_is_no_difference_and_it_says_so():
    table = table_of(rows("gfsa", [50, 51]))
    assert line_of(table, "gfsa").to_reference is None
    assert notes_of(table) == ["no run of plain with these settings, so no difference."]


def test_the_latest_row_of_a_run_counts_and_it_says_so():
    made = [
        row("gfsa", 0, 60.0, date="2026-11-16T00:00:00+00:00"),
        row("gfsa", 0, 10.0, date="2026-11-15T00:00:00+00:00"),
        row("gfsa", 1, 1.0),
        row("gfsa", 1, 2.0),
        *rows("plain", [50, 50]),
    ]
    table = table_of(made)
    assert line_of(table, "gfsa").rows.test.tolist() == [60.0, 2.0]
    assert "gfsa: 2 rows were replaced by a later run of the same seed." in notes_of(table)


def test_missing_seeds_are_said():
    table = table_of([*rows("plain", [50, 51, 52]), row("gfsa", 1, 53), row("gfsa", 5, 60)])
    assert line_of(table, "gfsa").to_reference.test.values == (2,)
    assert notes_of(table) == [
        "gfsa: seed 5 ran without plain and plain alone has seeds 0, 2; "
        "the difference is over seed 1.",
        "gfsa: one seed, so no interval.",
    ]


def test_a_failed_run_is_told_and_not_averaged():
    table = table_of([*rows("plain", [50, 51, 52]), *rows("gfsa", [51, math.nan, 54])])
    line = line_of(table, "gfsa")
    assert line.failed == (1,)
    assert line.mean == 52.5
    assert line.to_reference.test.seeds == (0, 2)
    assert any("seed 1 ended without a finite number" in note for note in notes_of(table))


A, B = "9+1+2 aaaaaaaa", "9+1+2 bbbbbbbb"


def test_runs_on_other_data_are_neither_paired_nor_averaged():
    made = [*rows("plain", [50, 51], data=A), *rows("plain", [10, 11], data=B)]
    made += rows("gfsa", [13, 15], data=B)
    tables = {table.data: table for table in make_tables(frame_of(made))}
    assert list(tables) == [A, B]
    assert [line.name for line in tables[A].lines] == ["plain"]
    assert line_of(tables[A], "plain").mean == 50.5
    assert line_of(tables[B], "plain").mean == 10.5
    assert line_of(tables[B], "gfsa").to_reference.test.values == (3, 4)
    assert tables[A].replaced.empty
    assert tables[B].replaced.empty
    assert titles([*tables.values()]) == [f"cola minilm (data {data})" for data in (A, B)]


def test_odd_coefficients_are_refused():
    line = line_of(table_of([row("gfsa", coefficients="a b")]), "gfsa")
    with pytest.raises(ValueError, match="gfsa seed 0 has coefficients 'a b'"):
        _ = line.coefficients


def test_different_metrics_cannot_share_a_table():
    with pytest.raises(ValueError, match=r"accuracy \(True\), matthews \(True\)"):
        table_of([row("plain"), row("gfsa", metric="accuracy")])
