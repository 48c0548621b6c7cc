"""``gfsa demo`` from beginning to end, in small."""

import json
import sys

from typer.testing import CliRunner

from gfsa.cli import build
from gfsa.lens import LensReport

runner = CliRunner()


def test_quick_demo_writes_figures_and_numbers(tmp_path):
    shown = runner.invoke(build(), ["demo", "--quick", "--depth", "2", "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    for text in ("plain", "degree 1", "GFSA K=3", "points", "demo.json"):
        assert text in shown.output
    for name in ("similarity", "accuracy", "response"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    report = LensReport.from_json(tmp_path / "lens.json")
    assert list(report.models) == ["plain", "degree 1", "GFSA K=3"]
    assert [len(model.attention) for model in report.models.values()] == [2, 2, 2]
    assert "lens.html" in shown.output.replace("\n", "")
    assert "GFSA K=3" in (tmp_path / "lens.html").read_text()
    numbers = json.loads((tmp_path / "demo.json").read_text())
    assert numbers["settings"]["depth"] == 2
    assert numbers["settings"]["held_out"] == "test"
    assert {run["variant"] for run in numbers["runs"]} == {"plain", "degree 1", "GFSA K=3"}
    assert len(numbers["findings"]) == 2


def test_without_the_demo_extra_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    shown = runner.invoke(build(), ["demo", "--quick", "--out", str(tmp_path)])
    assert shown.exit_code == 1
    assert "pip install gfsa-experiments" in shown.output


def test_settings_are_chosen_on_one_of_two_sets():
    shown = runner.invoke(build(), ["demo", "--on", "train"])
    assert shown.exit_code == 2
    assert "validation" in shown.output
