"""The figure of the suite of lengths."""

from pathlib import Path

import pytest

from gfsa_benchmarks.figure import curves, draw

ROWS = """suite,shape,variant,fwd_bwd_ms,peak_mib
lengths,1x1x16x4,plain,1.0,2.0
lengths,1x1x8x4,plain,0.5,1.0
ops,1x1x8x4,plain,9.0,9.0
lengths,1x1x8x4,plain,0.4,1.0
lengths,1x1x8x4,gfsa,0.8,1.5
"""


def test_points_in_order_of_length(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(ROWS)
    assert curves(file) == {"plain": [(8, 0.4, 1.0), (16, 1.0, 2.0)], "gfsa": [(8, 0.8, 1.5)]}


def test_another_kind_of_shape_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(ROWS)
    before = curves(file)
    file.write_text(ROWS.rstrip("\n") + "\nlengths,1x1x16x4:causal,plain,9.0,9.0\n")
    assert curves(file) == before


def test_no_rows_are_no_figure(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(ROWS.splitlines()[0])
    with pytest.raises(ValueError, match="no rows of the suite lengths"):
        curves(file)


def test_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "rows.csv", tmp_path / "figure.svg"
    file.write_text(ROWS)
    draw(file, out)
    first = out.read_text()
    assert ">gfsa</text>" in first
    draw(file, out)
    assert out.read_text() == first
