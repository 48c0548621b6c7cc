"""``gfsa tune``: its measurements decide what ``auto`` takes; with a fake GPU and timer."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from gfsa import cli
from gfsa.kernels import routes, tune_gpu, tuned
from gfsa.kernels.tuned import Machine, Row, Shape
from gfsa.operators import AttentionCall

BLACKWELL = Machine("NVIDIA B200", "2.11.0", "3.6.0")


class FakeGPU(tune_gpu.GPU):
    """Fused kernels that are faster up to 1,024 tokens, wrong at 512, and none for degree 1."""

    def refusal(self, shape: Shape) -> str | None:
        return "no kernel of degree 1" if shape.degree == 1 else None

    def prepare(self, shapes: Sequence[Shape]) -> Iterator[Shape]:
        yield from shapes

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

    def dim(self) -> int:
        return len(self.shape)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "folder" / "tuned.json"
    monkeypatch.setenv("GFSA_TUNED", str(path))
    monkeypatch.setattr(routes, "capability", lambda device: (10, 0))
    monkeypatch.setattr(routes, "TRITON", (3, 6))
    monkeypatch.setattr(routes, "_generator_cannot_be_reset", lambda device: False)
    monkeypatch.setattr(tuned, "this_machine", lambda device: BLACKWELL)
    tuned._rows.cache_clear()
    yield path
    tuned._rows.cache_clear()


def reason(tokens: int, head_dim: int = 64, degree: int = 2, **options: object) -> str | None:
    q = OnBlackwell(2, 4, tokens, head_dim)
    call = AttentionCall(q, q, **options)  # type: ignore[arg-type]
    return routes._reason_by_measurements(routes.situation_of(call, q, degree))  # type: ignore[arg-type]


def tuned_rows() -> list[Row]:
    found = map(FakeGPU(torch.device("cpu")).measure, tuned.SHAPES)
    return [row for row in found if not isinstance(row, str)]


def kept_in(file: Path) -> dict[Machine, list[Row]]:
    return {machine: list(rows.values()) for machine, rows in tuned.read(file).items()}


def test_without_measurements_torch_serves(file: Path) -> None:
    assert "run gfsa tune" in (reason(100) or "")


def test_the_faster_and_exact_kernels_are_taken(file: Path) -> None:
    tuned.write(file, BLACKWELL, tuned_rows())
    for tokens in (1, 128, 513, 1000, 1024):
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
    assert kept_in(file) == {BLACKWELL: tuned_rows(), other: tuned_rows()[:1]}


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
    tuned._rows.cache_clear()
    assert "run gfsa tune" in (reason(100) or "")


def test_measured_hopper_needs_no_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "capability", lambda device: (9, 0))
    assert reason(1000) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_needs_a_gpu(file: Path) -> None:
    shown = CliRunner().invoke(cli.build(), ["tune"])
    assert shown.exit_code == 2
    assert "torch sees none" in shown.output
    assert not file.exists()


def run_command(gpu: type[FakeGPU], monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune_gpu, "GPU", gpu)
    return CliRunner().invoke(cli.build(), ["tune"])


def test_the_command_writes_what_auto_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run_command(FakeGPU, monkeypatch)
    assert shown.exit_code == 0, shown.output
    assert "not served: no kernel of degree 1" in shown.output
    # faster at 128 and 1,024 tokens, not exact at 512, slower at 4,096
    assert re.search("2 +64 +causal masked +0.50[*] +0.50! +0.50[*] +1.50", shown.output)
    assert "auto uses the fused kernels for 16 of 32 kinds of calls" in shown.output
    # one screen
    assert len(shown.output.splitlines()) <= 24
    assert kept_in(file) == {BLACKWELL: tuned_rows()}
    assert reason(100) is None


class Interrupted(FakeGPU):
    """The user loses patience at 1,024 tokens."""

    def times(self, shape: Shape) -> tuple[float, float]:
        if shape.tokens == 1024:
            raise KeyboardInterrupt
        return super().times(shape)


def test_what_was_measured_before_an_interruption_is_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run_command(Interrupted, monkeypatch)
    assert shown.exit_code == 130
    assert "interrupted: the 8 kinds" in shown.output
    kept = kept_in(file)[BLACKWELL]
    assert {row.shape.tokens for row in kept} == {128, 512}
    assert reason(100) is None
    assert "did not measure" in (reason(1000) or "")


def test_interrupted_before_anything_was_measured(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(FakeGPU):
        def prepare(self, shapes: Sequence[Shape]) -> Iterator[Shape]:
            yield shapes[0]
            raise KeyboardInterrupt

    shown = run_command(Slow, monkeypatch)
    assert shown.exit_code == 130
    assert "nothing was written" in shown.output
    assert not file.exists()


def test_a_kernel_that_fails_leaves_the_others(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(FakeGPU):
        def times(self, shape: Shape) -> tuple[float, float]:
            if shape.head_dim == 128:
                raise RuntimeError("out of resource: shared memory")
            return super().times(shape)

    shown = run_command(Small, monkeypatch)
    assert shown.exit_code == 0
    assert "not served: failed: RuntimeError: out of resource: shared memory" in shown.output
    assert {row.shape.head_dim for row in kept_in(file)[BLACKWELL]} == {64}


def test_kernels_are_compiled_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape once; what fails is left to the measurement, which reports it."""
    compiled: list[Shape] = []

    def compile_one(gpu: tune_gpu.GPU, shape: Shape) -> None:
        compiled.append(shape)
        if shape.causal:
            raise RuntimeError("no such instruction")

    monkeypatch.setattr(tune_gpu.GPU, "_compile", compile_one)
    shapes = tuned.SHAPES
    done = list(tune_gpu.GPU(torch.device("cpu")).prepare(shapes))
    assert sorted(done) == sorted(compiled) == sorted(shapes)


def test_a_backward_pass_is_compiled_in_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, bool, bool]] = []

    def call(gpu: tune_gpu.GPU, shape: Shape, *arguments: object) -> None:
        multithreading = torch._C._is_multithreading_enabled()
        ran.append((str(arguments[-1]), torch.is_grad_enabled(), multithreading))

    monkeypatch.setattr(tune_gpu.GPU, "_call", call)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    tune_gpu.GPU(torch.device("cpu"))._compile(Shape(2, 64, 128, True, True))
    assert ran == [("fused", True, False)]


@pytest.mark.parametrize("shape", [Shape(2, 64, 128, True, True), Shape(1, 64, 128, False, False)])
def test_errors_are_those_to_the_dense_operator(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU torch's kernels take the place of the fused ones."""
    monkeypatch.setattr(tune_gpu, "_BACKENDS", ("sdpa", "sdpa"))
    gpu = tune_gpu.GPU(torch.device("cpu"))
    fused, by_torch = gpu.errors(shape)
    assert fused == by_torch
    assert 1e-4 < by_torch < 2e-2
    assert "need an NVIDIA GPU" in (gpu.refusal(shape) or "")


@pytest.mark.parametrize("tokens", tuned.LENGTHS)
def test_what_is_timed_is_checked(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the same length, with several heads; the maps of the check fit a small GPU."""
    asked: list[tuple[int, ...]] = []

    def tensors(gpu: tune_gpu.GPU, shape: Shape, *sizes: int) -> None:
        asked.append(sizes)
        raise InterruptedError

    monkeypatch.setattr(tune_gpu.GPU, "_tensors", tensors)
    gpu = tune_gpu.GPU(torch.device("cpu"))
    for measure in (gpu.errors, gpu.times):
        with pytest.raises(InterruptedError):
            measure(Shape(2, 128, tokens, True, False))
    (batch, heads, checked), (_, _, timed) = asked
    assert checked == timed == tokens
    assert heads > 1
    assert batch * heads * tokens**2 <= 2**25
