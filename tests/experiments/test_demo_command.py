"""``gfsa demo`` from beginning to end, in small."""

import json
import sys

import pytest
from typer.testing import CliRunner

from gfsa.cli import build
from gfsa.lens import LensReport

runner = CliRunner()


def test_quick_demo_writes_figures_and_numbers(tmp_path):
    shown = runner.invoke(build(), ["demo", "--quick", "--depth", "2", "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    for text in ("plain", "degree 1", "GFSA K=3", "bits per byte", "coefficients", "demo.json"):
        assert text in shown.output
    for name in ("similarity", "difference", "response"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    report = LensReport.from_json(tmp_path / "lens.json")
    names = ["plain", "plain, 1.2× steps", "degree 1", "GFSA K=3"]
    assert list(report.models) == names
    assert [len(model.attention) for model in report.models.values()] == [2, 2, 2, 2]
    # every filter's coefficients over training, from the first step on
    assert list(report.trajectories) == ["degree 1", "GFSA K=3"]
    assert report.trajectories["GFSA K=3"].steps[0] == 0
    assert report.trajectories["GFSA K=3"].steps[-1] == 20
    assert "lens.html" in shown.output.replace("\n", "")
    assert "GFSA K=3" in (tmp_path / "lens.html").read_text()
    numbers = json.loads((tmp_path / "demo.json").read_text())
    assert numbers["settings"]["depth"] == 2
    assert numbers["settings"]["held_out"] == "test"
    assert {run["variant"] for run in numbers["runs"]} == set(names)
    # one for each variant beside plain, and one for equal time
    assert len(numbers["findings"]) == 4
    assert "times that of plain here. Against plain, 1.2× steps" in numbers["findings"][-1]
    # no seed that the settings were chosen with
    assert {run["row"]["seed"] for run in numbers["runs"]} == {100, 101}
    ends = {run["variant"]: run["curve"][-1][0] for run in numbers["runs"]}
    assert ends == dict(zip(names, (20, 24, 20, 20), strict=True))


def test_without_the_demo_extra_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    shown = runner.invoke(build(), ["demo", "--quick", "--out", str(tmp_path)])
    assert shown.exit_code == 1
    assert "pip install ./experiments" in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--on", "train"), "validation"),
        (("--task", "glue"), "stdlib or digits"),
        (("--epochs", "2"), "--steps"),
        (("--task", "digits", "--steps", "2"), "--epochs"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, told):
    shown = runner.invoke(build(), ["demo", *arguments])
    assert shown.exit_code == 2
    assert told in shown.output


def test_a_file_in_the_place_of_its_folder_is_refused(tmp_path):
    (tmp_path / "demo").touch()
    shown = runner.invoke(build(), ["demo", "--quick", "--out", str(tmp_path / "demo" / "inside")])
    assert shown.exit_code == 2
    assert "a file, not a folder" in " ".join(shown.output.replace("│", " ").split())
