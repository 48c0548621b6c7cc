"""Training and inference on several processes give the numbers of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gfsa
from gfsa_experiments.runs.run import carry_out
from scale.workers.filter_rate import check_against_one_process, launched, one_process
from scale.workers.pretraining import SETTINGS
from support.launching import WORKERS, launch
from support.tiny_pretraining import a_run, built, write_corpus

# float64, relative to the largest number of each tensor
ROUNDING = 1e-12


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_way_to_share_a_model(processes: int, tmp_path: Path) -> None:
    """One test for all of them: the processes are started once."""
    file = tmp_path / "results.json"
    launcher = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    launch(launcher, WORKERS / "distributed.py", str(file))
    results = json.loads(file.read_text())
    expected = {"ddp", "fsdp", "fsdp_bfloat16", "deferred", "checkpoints"}
    assert results.keys() == expected | {"tensor_parallel", "context_parallel"}
    for scenario, errors in results.items():
        assert len(errors) >= 3
        for name, error in errors.items():
            # NaN is no small number
            assert error <= ROUNDING, f"{scenario} of {name}: {error}"


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    expected = one_process(tmp_path / "one")
    found = launched("fsdp2", tmp_path)
    check_against_one_process(found, expected)
    assert found["rates"] == expected["rates"]


# sharded sums are in another order
@pytest.mark.parametrize(
    ("way", "close"), [("sharded", 1e-5), pytest.param("replicated", 1e-6, marks=pytest.mark.slow)]
)
def test_interrupted_and_resumed(
    way: str, close: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GFSA_CACHE", str(tmp_path / "cache"))
    data = write_corpus(tmp_path)
    alone = a_run(data, tmp_path / "one", "gfsa", **SETTINGS)
    row = carry_out(alone)
    launcher = ["torchrun", "--standalone", "--nproc-per-node=2"]
    launch(launcher, WORKERS / "pretraining.py", str(data), str(tmp_path / "two"), way)
    (file,) = (tmp_path / "two").glob("**/row.json")
    two = json.loads(file.read_text())
    assert two["device"].startswith("2 × ")
    for name in ("test", "valid", "moved"):
        assert two[name] == pytest.approx(getattr(row, name), rel=close), name
    assert two["coefficients"] == row.coefficients
    # the loss of a step is that of all processes, not of the first one's share
    logs = [folder / "metrics.jsonl" for folder in (file.parent, alone.folder)]
    for lines in zip(*(log.read_text().splitlines() for log in logs), strict=True):
        ours, expected = map(json.loads, lines)
        assert ours == pytest.approx(expected, rel=close)
    weights = torch.load(file.parent / "model.pt")
    expected = torch.load(alone.folder / "model.pt")
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():
            torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-5)
    model = built(data).model
    gfsa.load(model, file.parent / "filters")
    assert len(gfsa.filters_of(model)) == 2
