"""``gfsa bench`` from beginning to end, on shapes that take no time."""

import csv

import pytest
import torch
from typer.testing import CliRunner

from gfsa.cli import build
from gfsa_benchmarks.harness import COLUMNS

runner = CliRunner()


def bench(*arguments):
    return runner.invoke(build(), ["bench", "--device", "cpu", "--rounds", "1", *arguments])


def test_ops_end_to_end(tmp_path):
    path = tmp_path / "bench.csv"
    shown = bench("--shapes", "1x2x16x4,2x1x8x4:causal", "--csv", str(path))
    assert shown.exit_code == 0, shown.output
    assert "10 rows added" in shown.output
    assert "faster than" in shown.output
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["variant"] for row in rows[:5]] == [
        "plain",
        "gfsa degree 1",
        "gfsa",
        "gfsa sdpa",
        "published",
    ]
    assert {row["shape"] for row in rows} == {"1x2x16x4", "2x1x8x4:causal"}
    assert {row["dtype"] for row in rows} == {"float32"}
    for row in rows:
        assert float(row["fwd_ms"]) > 0
        assert float(row["fwd_bwd_ms"]) > 0
        assert float(row["peak_mib"]) > 0


def test_linear_end_to_end_keeps_nothing_when_told_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = bench("--suite", "linear", "--shapes", "1x1x16x4,1x1x32x4", "--no-append")
    assert shown.exit_code == 0, shown.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "speed"], "expected a suite of"),
        (["--dtype", "int8"], "expected a dtype of"),
        (["--shapes", "large"], "BATCHxHEADSxTOKENSxDIM"),
        (["--suite", "linear", "--shapes", "1x1x8x4:causal"], "neither causal nor padded"),
        (["--device", "toaster"], "expected a device"),
        (["--device", "meta"], "cpu and cuda"),
        (["--graphs", "--shapes", "1x1x8x4"], "graphs are for CUDA"),
        (["--compile"], "nothing to compile"),
        (["--suite", "models", "--compile", "--compile-blocks"], "whole models"),
        (["--variants", "plain,fast", "--shapes", "1x1x8x4"], "expected variants of plain, gfsa"),
        (["--suite", "decode", "--shapes", "1x1x8x4:padded"], "no padded shapes"),
        (["--profile", "--shapes", "1x1x8x4"], "launched on CUDA"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    shown = bench(*arguments, "--no-append")
    assert shown.exit_code == 2
    # the message is boxed and broken into lines
    words = shown.output.replace("│", " ").split()
    assert " ".join(message.split()) in " ".join(words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_says_so():
    shown = bench("--device", "cuda", "--no-append")
    assert shown.exit_code == 2
    assert "no CUDA device" in shown.output
