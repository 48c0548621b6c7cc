"""From rows to lines: what is grouped, paired, averaged and left out."""

import math

import pytest

from gfsa_experiments.results.report import notes_of
from gfsa_experiments.results.tables import latest, make_tables
from support.result_rows import row, rows


def table_of(made):
    (table,) = make_tables(latest(made))
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
    tables = make_tables(latest(made))
    assert [(table.task, table.settings) for table in tables] == [
        ("cola minilm", ""),
        ("cola minilm", "epochs=3"),
        ("rte minilm", ""),
    ]
    # never paired over settings
    assert line_of(tables[0], "gfsa").difference.values == (2, 2)


def test_mean_and_std_are_over_all_seeds_of_a_line():
    line = line_of(table_of([*rows("plain", [1.0]), *rows("gfsa", [2.0, 4.0, 6.0])]), "gfsa")
    assert line.mean == 4.0
    assert line.std == 2.0
    assert line.difference.seeds == (0,)


def test_options_are_lines_of_their_own():
    made = [*rows("plain", [50, 50]), *rows("gfsa", [51, 52], options="K=2")]
    made += rows("gfsa", [49, 47], options="K=4")
    table = table_of(made)
    assert line_of(table, "gfsa K=2").difference.values == (1, 2)
    assert line_of(table, "gfsa K=4").difference.values == (-1, -3)


def test_without_plain_there_is_no_difference_and_it_says_so():
    table = table_of(rows("gfsa", [50, 51]))
    assert line_of(table, "gfsa").difference is None
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
    assert line_of(table, "gfsa").values == {0: 60.0, 1: 2.0}
    assert "gfsa: 2 rows were replaced by a later run of the same seed." in notes_of(table)


def test_missing_seeds_are_said():
    table = table_of([*rows("plain", [50, 51, 52]), row("gfsa", 1, 53), row("gfsa", 5, 60)])
    assert line_of(table, "gfsa").difference.values == (2,)
    assert notes_of(table) == [
        "gfsa: seed 5 ran without plain and plain alone has seeds 0, 2; "
        "the difference is over seed 1.",
        "gfsa: one seed, so no interval.",
    ]


def test_no_common_seed_is_said():
    table = table_of([row("plain", 0), row("gfsa", 1)])
    assert notes_of(table) == ["gfsa: has no seed in common with plain, so no difference."]


def test_a_failed_run_is_told_and_not_averaged():
    table = table_of([*rows("plain", [50, 51, 52]), *rows("gfsa", [51, math.nan, 54])])
    line = line_of(table, "gfsa")
    assert line.failed == (1,)
    assert line.mean == 52.5
    assert line.difference.seeds == (0, 2)
    assert any("seed 1 ended without a finite number" in note for note in notes_of(table))


A, B = "9+1+2 aaaaaaaa", "9+1+2 bbbbbbbb"


def tables_by_data(made):
    return {table.data: table for table in make_tables(latest(made))}


def test_runs_on_other_data_are_neither_paired_nor_averaged():
    made = [*rows("plain", [50, 51], data=A), *rows("plain", [10, 11], data=B)]
    made += rows("gfsa", [13, 15], data=B)
    tables = tables_by_data(made)
    assert list(tables) == [A, B]
    assert [line.name for line in tables[A].lines] == ["plain"]
    assert line_of(tables[A], "plain").mean == 50.5
    assert line_of(tables[B], "plain").mean == 10.5
    assert line_of(tables[B], "gfsa").difference.values == (3, 4)
    assert tables[A].replaced.empty
    assert tables[B].replaced.empty
    assert A in notes_of(tables[A])[0]


def test_a_method_on_other_data_than_plain_has_no_difference():
    made = [*rows("plain", [50, 51], data=A), *rows("gfsa", [10, 11], data=B)]
    gfsa = tables_by_data(made)[B]
    assert line_of(gfsa, "gfsa").difference is None
    assert "no run of plain with these settings, so no difference." in notes_of(gfsa)


def test_other_data_of_another_task_is_no_matter():
    made = [*rows("plain", [50, 51], data=A), *rows("plain", [1, 2], data=B, task="rte minilm")]
    assert [table.data for table in make_tables(latest(made))] == [None, None]


def test_rows_that_do_not_say_go_with_any_and_it_is_said():
    made = [*rows("plain", [50, 51]), *rows("gfsa", [52, 54], data=A)]
    table = table_of(made)
    assert table.data is None
    assert line_of(table, "gfsa").difference.values == (2, 3)
    assert notes_of(table)[0].startswith("2 of 4 rows do not name their data")


def test_rows_that_do_not_say_stay_together_where_there_are_several_data():
    made = [*rows("plain", [50, 51]), *rows("gfsa", [51, 53])]
    made += [row("plain", 0, 10, data=A), *rows("gfsa", [13, 60], data=A)]
    made += rows("plain", [70, 70, 70], data=B)
    tables = tables_by_data(made)
    assert list(tables) == ["", A, B]
    assert line_of(tables[""], "gfsa").difference.values == (1, 2)
    # what they are on is not known, so they stand in for no run on the others' data
    assert line_of(tables[A], "plain").values == {0: 10}
    assert line_of(tables[A], "gfsa").difference.values == (3,)
    assert line_of(tables[B], "plain").values == {0: 70, 1: 70, 2: 70}
    assert any("do not name their data" in note for note in notes_of(tables[""]))
    assert not any("do not name their data" in note for note in notes_of(tables[A]))


def test_a_later_row_takes_the_place_of_one_that_may_be_on_the_same_data():
    old, new = row("plain", 0, 50), row("plain", 0, 60, date="2026-11-16", data=A)
    table = table_of([old, new])
    assert (table.rows.test.tolist(), table.rows.data.tolist()) == ([new.test], [A])
    assert (table.replaced.test.tolist(), table.replaced.data.tolist()) == ([old.test], [""])
    # and leaves those on other data in theirs
    tables = tables_by_data([new, row("plain", 0, 70, date="2026-11-17", data=B)])
    assert [one.rows.test.tolist() for one in tables.values()] == [[60], [70]]


def test_times_only_from_runs_alone_on_the_same_device():
    made = [
        *rows("plain", [1, 2], seconds_per_step=0.1),
        *rows("gfsa", [1, 2], seconds_per_step=0.2),
        *rows("contranorm", [1, 2], seconds_per_step=0.2, jobs=4),
        *rows("degree1", [1, 2], seconds_per_step=0.2, device="cpu"),
        row("twicing", 0, seconds_per_step=0.3),
        row("twicing", 1, seconds_per_step=9.0, jobs=2),
    ]
    table = table_of(made)
    assert line_of(table, "gfsa").times == (2.0,)
    assert line_of(table, "contranorm").times == ()
    assert line_of(table, "degree1").times == ()
    assert line_of(table, "twicing").times == pytest.approx((3.0,))


def test_what_the_filters_did():
    made = [
        row("gfsa", 0, added=144, moved=0.1, coefficients="0.1 0.9 0.0"),
        row("gfsa", 1, added=144, moved=0.3, coefficients="0.3 0.7 -0.2"),
    ]
    line = line_of(table_of(made), "gfsa")
    assert line.added == (144,)
    assert line.moved == pytest.approx(0.2)
    assert line.coefficients == pytest.approx((0.2, 0.8, -0.1))
    assert line_of(table_of([row("plain")]), "plain").coefficients is None


def test_odd_coefficients_are_refused():
    line = line_of(table_of([row("gfsa", coefficients="a b")]), "gfsa")
    with pytest.raises(ValueError, match="gfsa seed 0 has coefficients 'a b'"):
        _ = line.coefficients


def test_different_metrics_cannot_share_a_table():
    with pytest.raises(ValueError, match=r"accuracy \(True\), matthews \(True\)"):
        table_of([row("plain"), row("gfsa", metric="accuracy")])


def test_p_is_adjusted_over_every_table_of_the_folder():
    made = [*rows("plain", [1.0, 2.0, 3.0]), *rows("gfsa", [2.0, 3.1, 4.2])]
    alone = line_of(table_of(made), "gfsa")
    assert alone.adjusted_p == alone.difference.p
    other = [*rows("plain", [1.0, 2.0, 3.0], task="rte")]
    other += rows("gfsa", [1.5, 2.0, 2.9], task="rte")
    tables = make_tables(latest(made + other))
    assert line_of(tables[0], "gfsa").adjusted_p == pytest.approx(2 * alone.difference.p)
