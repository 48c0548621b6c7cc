"""What a run says while it trains: on a terminal, in a file, and of its speed."""

from __future__ import annotations

import io
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gfsa_experiments.commands.progress_bars import progress_bars
from gfsa_experiments.engine import speed
from gfsa_experiments.engine.progress import Report
from gfsa_experiments.runs.run import carry_out
from support.tiny_pretraining import a_run, write_corpus

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("terminal", [False, True])
def test_lines_are_for_files_and_bars_for_terminals(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GFSA_CACHE", str(tmp_path / "cache"))
    run = a_run(write_corpus(tmp_path), tmp_path / "runs", max_steps=6, evaluations=3, log_every=1)
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=40)
    with progress_bars(console, 1) as (progress, _):
        carry_out(run, progress(run))
    found = re.findall(
        r"seed 0: step (\d) of 6, (\d+) tokens, loss [\d.]+, valid loss [\d.]+, [\d,]+ tokens/s\n",
        written.getvalue(),
    )
    assert found == ([] if terminal else [("2", "256"), ("4", "512"), ("6", "768")])


def test_metrics_are_written_as_the_run_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GFSA_CACHE", str(tmp_path / "cache"))
    data = write_corpus(tmp_path)
    settings: dict[str, Any] = {"max_steps": 6, "evaluations": 3, "checkpoints": False}
    run = a_run(data, tmp_path / "runs", **settings)
    steps: list[list[int]] = []

    def watching(report: Report) -> None:
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        steps.append([json.loads(line)["step"] for line in lines])

    carry_out(run, watching)
    assert steps == [[2], [2, 4], [2, 4, 6]]


class TestPeak:
    gpu = torch.device("cuda")

    def named(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    def test_a_gpu_without_a_known_peak_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.named("NVIDIA Quadro Nine", monkeypatch)
        with pytest.warns(UserWarning, match="the peak of NVIDIA Quadro Nine is not known, only"):
            speed.warn_of_unknown_peak(self.gpu)

    def test_others_are_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.named("NVIDIA H100 80GB HBM3", monkeypatch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            speed.warn_of_unknown_peak(self.gpu)
            speed.warn_of_unknown_peak(torch.device("cpu"))
        assert speed.peak_flops(self.gpu) == 989e12

    def test_a_run_warns(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GFSA_CACHE", str(tmp_path / "cache"))
        asked: list[torch.device] = []
        monkeypatch.setattr("gfsa_experiments.engine.trainer.warn_of_unknown_peak", asked.append)
        carry_out(a_run(write_corpus(tmp_path), tmp_path / "runs", max_steps=1))
        assert asked == [torch.device("cpu")]
