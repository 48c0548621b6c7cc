"""``gfsa tune``: its measurements decide what ``auto`` takes; with a fake GPU and timer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gfsa import cli, tune
from gfsa.operators import AttentionCall
from gfsa.operators.fused import eligibility, tune_gpu, tuned
from gfsa.operators.fused.tuned import Machine, Row, Shape

BLACKWELL = Machine("NVIDIA B200", "2.11.0", "3.6.0")


class FakeGPU:
    """Fused kernels that are faster up to 1,024 tokens, wrong at 512, and none for degree 1."""

    machine = BLACKWELL

    def refusal(self, shape: Shape) -> str | None:
        return "no kernel of degree 1" if shape.degree == 1 else None

    def errors(self, shape: Shape) -> tuple[float, float]:
        return (0.3 if shape.tokens == 512 else 0.002), 0.002

    def times(self, shape: Shape) -> tuple[float, float]:
        return (1.0 if shape.tokens <= 1024 else 3.0), 2.0


class OnBlackwell:
    """Tokens that say they lie on a GPU that was not measured."""

    is_cuda, is_nested = True, False
    device = torch.device("cuda", 0)
    dtype = torch.bfloat16

    def __init__(self, *shape: int) -> None:
        self.shape = torch.Size(shape)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "folder" / "tuned.json"
    monkeypatch.setenv("GFSA_TUNED", str(path))
    monkeypatch.setattr(eligibility, "capability", lambda device: (10, 0))
    monkeypatch.setattr(eligibility, "TRITON", (3, 6))
    monkeypatch.setattr(tuned, "this_machine", lambda device: BLACKWELL)
    tuned._table.cache_clear()
    yield path
    tuned._table.cache_clear()


def reason(tokens: int, head_dim: int = 64, degree: int = 2, **options: object) -> str | None:
    q = OnBlackwell(2, 4, tokens, head_dim)
    return eligibility.reason_against(AttentionCall(q, q, **options), degree)  # type: ignore[arg-type]


def tuned_rows() -> list[Row]:
    return tune.measure(FakeGPU(), list(tune.all_shapes()))


def test_without_measurements_torch_serves(file: Path) -> None:
    assert "run gfsa tune" in (reason(100) or "")


def test_the_faster_and_exact_kernels_are_taken(file: Path) -> None:
    tuned.write(file, BLACKWELL, tuned_rows())
    for tokens in (1, 128, 129, 256, 1000, 1024):
        assert reason(tokens) is None
        assert reason(tokens, head_dim=40, is_causal=True) is None
    assert "less exact" in (reason(300) or "")
    assert "torch's kernels faster" in (reason(1025) or "")
    # beyond the longest that was measured
    assert "torch's kernels faster" in (reason(100_000) or "")
    assert "did not measure" in (reason(100, degree=1) or "")


def test_only_what_was_measured(file: Path) -> None:
    tuned.write(file, BLACKWELL, tuned_rows())
    keys = torch.ones(2, 1, 1, 100, dtype=torch.bool)
    assert reason(100, attn_mask=keys) is None
    assert "neither dropout" in (reason(100, dropout_p=0.1) or "")
    pairs = torch.ones(100, 100, dtype=torch.bool)
    assert "masks over queries and keys" in (reason(100, attn_mask=pairs) or "")


@pytest.mark.parametrize("field", ["gpu", "torch", "triton", "gfsa"])
def test_measurements_of_another_machine_are_not_used(
    file: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned.write(file, BLACKWELL, tuned_rows())
    other = BLACKWELL._replace(**{field: "another"})
    monkeypatch.setattr(tuned, "this_machine", lambda device: other)
    assert "run gfsa tune" in (reason(100) or "")
    # both have their measurements then
    tuned.write(file, other, tuned_rows()[:1])
    assert tuned.read(file) == {BLACKWELL: tuned_rows(), other: tuned_rows()[:1]}


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2, "machines": []}', '{"format": 1}'])
def test_a_damaged_file_is_reported(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.warns(UserWarning, match="run gfsa tune again"):
        assert "run gfsa tune" in (reason(100) or "")


def test_a_folder_of_another_user_is_reported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user who may not look into its HOME."""

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.warns(UserWarning, match="Permission denied"):
        assert "run gfsa tune" in (reason(100) or "")


def test_a_deleted_file_means_torch(file: Path) -> None:
    tuned.write(file, BLACKWELL, tuned_rows())
    assert json.loads(file.read_text())["format"] == tuned.FORMAT
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    file.unlink()
    tuned._table.cache_clear()
    assert "run gfsa tune" in (reason(100) or "")


def test_measured_hopper_needs_no_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "capability", lambda device: (9, 0))
    assert reason(1000) is None


def test_reasons_are_reported_with_their_shapes() -> None:
    reported: list[tuple[Shape, Row | str]] = []
    rows = tune.measure(FakeGPU(), list(tune.all_shapes()), lambda *found: reported.append(found))
    assert [row for _, row in reported if isinstance(row, Row)] == rows
    assert {row for _, row in reported if isinstance(row, str)} == {"no kernel of degree 1"}
    assert len(reported) == len(set(tune.all_shapes()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_needs_a_gpu(file: Path) -> None:
    shown = CliRunner().invoke(cli.build(), ["tune"])
    assert shown.exit_code == 2
    assert "torch sees none" in shown.output
    assert not file.exists()


def test_the_command_writes_what_auto_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune_gpu, "GPU", lambda device: FakeGPU())
    shown = CliRunner().invoke(cli.build(), ["tune"])
    assert shown.exit_code == 0, shown.output
    assert "not served: no kernel of degree 1" in shown.output
    assert tuned.read(file) == {BLACKWELL: tuned_rows()}
    assert reason(100) is None


@pytest.mark.parametrize("shape", [Shape(2, 64, 128, True, True), Shape(1, 64, 128, False, False)])
def test_errors_are_those_to_the_dense_operator(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU torch's kernels take the place of the fused ones."""
    monkeypatch.setattr(tune_gpu, "_BACKENDS", ("sdpa", "sdpa"))
    monkeypatch.setattr(tune_gpu, "LONGEST_CHECK", 24)
    gpu = tune_gpu.GPU(torch.device("cpu"))
    fused, by_torch = gpu.errors(shape)
    assert fused == by_torch
    assert 1e-4 < by_torch < 2e-2
    assert "need an NVIDIA GPU" in (gpu.refusal(shape) or "")
