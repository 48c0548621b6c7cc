"""The scripts that time tiles: what they launch, and what they do with candidates that fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gfsa_benchmarks import host_calls, tiles
from gfsa_benchmarks.case import Shape
from gfsa_benchmarks.tiles import Candidate
from gfsa_benchmarks.timing import Timing

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def by_turns(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is timed, without a GPU: each call runs once and takes a millisecond."""
    timed: list[Any] = []

    def once(works: list[Any], rounds: int, device: Any) -> list[Timing]:
        timed.extend(works)
        return [Timing(1.0, 1.0, 1.0) for work in works if work() is not work]

    monkeypatch.setattr(tiles, "captured", lambda work: work)
    monkeypatch.setattr(tiles, "interleaved", once)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return timed


@pytest.mark.parametrize(
    "text",
    ["1x4/2x128x64:causal", "2x2x64x128", "1x1x64x80:causal", "1x2x68x40", "1x1x2048x128:causal"],
)
def test_the_gradient_on_hopper(
    text: str, by_turns: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kernel gets as many tiles as it has blocks, and whole calls run by every path."""
    module = script("hopper_tiles")
    shape = Shape.parse(text)
    with host_calls.nothing_launched():
        call = module.Call(shape, "cpu")
        for name in module.hopper.TILES:
            ways = call.candidates(name)
            assert sum("now" in label for label, _ in ways) == 1
            for _, prepare in ways:
                prepare()()
        module.Call = lambda shape: call
        for case in module.cases(shape):
            module.compile_case(case)
        module.measure(shape, 1)
    shown = capsys.readouterr().out
    assert "does not run" not in shown
    assert "left out" not in shown
    assert f"{text} whole calls Hopper kernels" in shown
    assert ("equal bits" in shown) == (shape.tokens == 2048)


@pytest.mark.parametrize("text", ["1x2x1027x64", "2x2x512x96:causal:padded"])
def test_what_the_gradient_on_hopper_does_not_take(text: str) -> None:
    module = script("hopper_tiles")
    if text.startswith("2"):
        with pytest.raises(ValueError, match="without padding"):
            module.Call(Shape.parse(text), "cpu")
        return
    with pytest.raises(ValueError, match="multiple of 4"):
        module.Call(Shape.parse(text), "cpu")


def test_packed_rows(by_turns: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    module = script("packed_tiles")
    shape = Shape.parse("1x2x256x64")
    bench, packed_bench = module.Bench, module.packed_bench
    module.Bench = lambda *given: bench(*given[:4], "cpu")
    module.packed_bench = lambda shape: packed_bench(shape, "cpu")
    with host_calls.nothing_launched():
        for case in module.cases(shape):
            module.compile_case(case)
        module.measure(shape, 1)
    shown = capsys.readouterr().out
    assert "does not run" not in shown
    assert shown.count("causal rows") == len(module.CANDIDATES)


@pytest.mark.parametrize("is_packed", [False, True])
def test_heads_at_a_time(
    is_packed: bool, by_turns: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The script's own part; what it launches runs on a GPU alone."""
    module = script("heads_at_a_time")
    module.DEVICE, module.BACKEND = "cpu", "sdpa"
    module.captured = lambda work: work
    module.interleaved = lambda works, *rest, **options: tiles.interleaved(works, 1, None)
    text = "1x4x256x16@1,2" if is_packed else "1x4/2x32x16@1,2"
    usual = module.sweep.heads_at_a_time, module.gradient.heads_at_a_time
    module.measured(text, is_packed, None)
    forward, both = capsys.readouterr().out.splitlines()
    name = "causal rows" if is_packed else "plain"
    numbers = f"ms: {name} 1.000; 1: 1.000 (1.000), 2: 1.000 (1.000)"
    assert forward == f"{text.partition('@')[0]} forward, {numbers}"
    assert both == f"{text.partition('@')[0]} both, {numbers}"
    assert len(by_turns) == 6
    assert usual == (module.sweep.heads_at_a_time, module.gradient.heads_at_a_time)


def test_a_decoded_token(by_turns: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    module = script("decode_splits")
    shape = Shape.parse("2x4x64x16")
    bench = module.Bench
    module.FEWEST_PROGRAMS, module.CACHES = 8, 2
    module.Bench = lambda shape, device, caches=2, degree=2: bench(shape, "cpu", caches, degree)
    with host_calls.nothing_launched():
        for case in module.cases(shape):
            module.compile_case(case)
        module.measure(shape, 1)
    shown = capsys.readouterr().out
    assert "does not run" not in shown
    # two calls of a millisecond
    for degree in (1, 2):
        assert f"{shape} degree {degree} plain, static" in shown
    assert "500.00 µs  1.000" in shown
    assert len(by_turns) == 2 * (3 + len(list(bench(shape, "cpu", 1).candidates())))


def test_a_candidate_that_does_not_run_is_left_out(
    by_turns: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large() -> Any:
        raise RuntimeError("out of shared memory")

    candidates = [Candidate("small", lambda: lambda: None), Candidate("large", too_large)]
    tiles.compiled(candidates, "1x1x8x8 kernel")
    assert tiles.times(candidates, "1x1x8x8 kernel", 1) == [("small", 1000.0)]
    shown = capsys.readouterr().out
    assert "1x1x8x8 kernel large does not run: RuntimeError('out of shared memory')" in shown
    assert "1x1x8x8 kernel large left out: RuntimeError" in shown


def test_a_shape_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tiles", "12x64"])
    with pytest.raises(SystemExit):
        tiles.run("Times.", lambda shape: [], lambda case: None, lambda shape, rounds: None)
    assert "expected a shape as BATCHxHEADSxTOKENSxDIM" in capsys.readouterr().err
