"""Several processes compute what one computes: DDP, FSDP2, tensor and context parallel (gloo)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.launching import WORKERS, launch
from support.matrix import Matrix

# float64, relative to the largest number of each tensor
ROUNDING = 1e-12
SHOWN = ["op", "BERT", "GPT-2", "ViT", "GPS"]


def torchrun(processes: int, folder: Path) -> dict[str, dict[str, float]]:
    file = folder / "results.json"
    launcher = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    launch(launcher, WORKERS / "distributed.py", str(file))
    results: dict[str, dict[str, float]] = json.loads(file.read_text())
    return results


def check(results: dict[str, dict[str, float]], scenario: str, names: list[str]) -> None:
    assert sorted(results[scenario]) == sorted(names)
    for name, error in results[scenario].items():
        # NaN is no small number
        assert error <= ROUNDING, f"{scenario} of {name}: {error}"


def test_two_processes(tmp_path: Path, matrix: Matrix) -> None:
    """One test for all of them: the processes are started once."""
    two = torchrun(2, tmp_path)
    check(two, "ddp", [*SHOWN, "GPT-2 +"])
    check(two, "fsdp", [*SHOWN, "GPT-2 +"])
    # PyG's GIN multiplies by a float32 buffer, with which bfloat16 weights do not go
    check(two, "fsdp_bfloat16", SHOWN[:-1])
    check(two, "deferred", ["op", "BERT", "GPT-2"])
    check(two, "checkpoints", SHOWN)
    check(two, "tensor_parallel", ["op", "BERT", "ViT", "Llama", "Llama +"])
    check(two, "context_parallel", ["op", "BERT", "GPT-2", "GPT-2 +"])
    for name in SHOWN:
        matrix("DDP", name)
        matrix("FSDP2", name, "✓ in float32" if name == "GPS" else "✓")
    for name in ("op", "BERT", "ViT"):
        matrix("tensor parallel", name)
    # torch has no plan for projections that hold q, k and v in one matrix
    matrix("tensor parallel", "GPT-2", "no plan for its fused projection (Llama: ✓)")
    matrix("tensor parallel", "GPS", "no plan for its fused projection")
    for name in ("op", "BERT", "GPT-2"):
        matrix("context parallel", name)


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    results = torchrun(4, tmp_path)
    for scenario, errors in results.items():
        check(results, scenario, list(errors))


# examples/accelerate_fsdp2.py is launched in every run
@pytest.mark.slow
def test_accelerate_launch(tmp_path: Path) -> None:
    launcher = ["accelerate", "launch", "--num_processes=2", "--num_machines=1"]
    # what starts more than one process here; the script asks for the CPU
    launcher += ["--multi_gpu"]
    launcher += ["--mixed_precision=no", "--dynamo_backend=no"]
    launch(launcher, WORKERS / "accelerated.py", str(tmp_path))
    thetas = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert thetas[0]["theta"] == thetas[1]["theta"]
    assert thetas[0]["processes"] == 2
    # two processes on half a batch each learn what one process on the whole batch learns
    assert thetas[0]["distance to one process"] <= ROUNDING
    assert thetas[0]["moved"] > 1e-3
