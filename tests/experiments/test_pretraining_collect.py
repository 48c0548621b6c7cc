"""What runs leave behind, from their folders to the tables of the results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gfsa_experiments.results.pretraining.collect import (
    add_tables,
    collect,
    read_tables,
    write_tables,
)
from gfsa_experiments.runs.run import carry_out
from support.tiny_pretraining import SMALL, a_run, write_corpus

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pretraining_curves.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a plain and of a filtered run, and of one that was interrupted."""
    root = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GFSA_CACHE", str(root / "cache"))
        data = write_corpus(root)
        for method in ("plain", "gfsa"):
            carry_out(a_run(data, root / "runs", method, probes=2, evaluations=2, max_steps=2))
    (root / "runs/pretrain/broken/gfsa/seed-7").mkdir(parents=True)
    return root / "runs"


def test_every_file_of_every_finished_run_is_collected(runs: Path) -> None:
    tables, unfinished = collect(runs)
    assert [path.name for path in unfinished] == ["seed-7"]
    assert [line["method"] for line in tables["curves"]] == ["gfsa"] * 2 + ["plain"] * 2
    (folder,) = (path.parent for path in runs.rglob("row.json") if "gfsa" in str(path))
    probes = json.loads((folder / "probes.json").read_text())
    own = [line for line in tables["probes"] if line["method"] == "gfsa"]
    found = {(line["probe"], line["layer"]): line["values"] for line in own}
    assert float(found["induction second", ""]) == pytest.approx(
        probes["induction"]["second"], rel=1e-4
    )
    for name in ("position", "frequency"):
        values = [float(value) for value in found[name, ""].split()]
        assert values == pytest.approx(probes[name], rel=1e-4)
    for layer in range(SMALL.depth or 0):
        sinks = [float(value) for value in found["sink", str(layer + 1)].split()]
        assert sinks == pytest.approx(probes["sink"][layer], rel=1e-4)
    # start and two validations of every layer, a value per head
    coefficients = tables["coefficients"]
    assert [(line["step"], line["layer"]) for line in coefficients] == [
        (step, layer) for step in ("0", "1", "2") for layer in ("1", "2")
    ]
    assert (coefficients[0]["c0"], coefficients[0]["c1"]) == ("0 0", "1 1")
    written = (folder / "coefficients.csv").read_text().splitlines()[-1].split(",")
    assert float(coefficients[-1]["c2"].split()[-1]) == pytest.approx(float(written[-1]), rel=1e-4)


def test_the_command_writes_the_tables_and_adds_them(runs: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    # what earlier scripts ask for, the path of a file, is no error
    done = run("collect", runs, tmp_path / "out" / "curves.csv")
    assert done.returncode == 0, done.stderr
    assert "not finished, left out" in done.stdout
    done = run("add", tmp_path / "out", tmp_path / "results")
    assert "coefficients: 1 runs added, 0 replaced" in done.stdout
    assert read_tables(tmp_path / "results/pretraining") == read_tables(tmp_path / "out")
    done = run("collect", tmp_path / "out", tmp_path)
    assert done.returncode == 1
    assert "no run in it; expected the --out of gfsa train" in done.stderr


def test_tables_are_read_as_they_were_written(runs: Path, tmp_path: Path) -> None:
    tables, _ = collect(runs)
    write_tables(tables, tmp_path)
    read = read_tables(tmp_path)
    assert read["curves"] == sorted(tables["curves"], key=lambda line: line["method"])
    assert len(read["coefficients"]) == len(tables["coefficients"])


def test_other_numbers_of_a_run_are_not_taken_in_silence(runs: Path, tmp_path: Path) -> None:
    tables, _ = collect(runs)
    add_tables(tables, tmp_path)
    before = (tmp_path / "curves.csv").read_text()
    # the same once more changes nothing
    assert "curves: 0 runs added, 0 replaced" in add_tables(tables, tmp_path)
    assert (tmp_path / "curves.csv").read_text() == before
    tables["curves"][0] = tables["curves"][0] | {"valid loss": "1.0"}
    with pytest.raises(ValueError, match=r"has other numbers of .* Nothing was written"):
        add_tables(tables, tmp_path)
    assert (tmp_path / "curves.csv").read_text() == before
    assert "curves: 0 runs added, 1 replaced" in add_tables(tables, tmp_path, replace=True)


def test_one_run_in_two_folders_is_refused(runs: Path, tmp_path: Path) -> None:
    for place in ("a", "b"):
        for row in runs.rglob("row.json"):
            copy = tmp_path / place / row.relative_to(runs)
            copy.parent.mkdir(parents=True)
            copy.write_text(row.read_text())
    with pytest.raises(ValueError, match="have the same run"):
        collect(tmp_path)
