"""The suites of a cache: one new token, compiled or not, and the prompt that fills it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from gfsa_benchmarks import decode
from gfsa_benchmarks.case import Setting, Shape

CPU = Setting(torch.device("cpu"), torch.float32)
COMPILED = Setting(torch.device("cpu"), torch.float32, compiled="model")
SHAPE = Shape(2, 2, 40, 8)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "LAYERS", 1)
    monkeypatch.setattr(decode, "VOCABULARY", 32)


def test_a_compiled_step_gives_what_eager_mode_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    compiler = torch.compile

    def eager(function: Any, mode: str, fullgraph: bool) -> Any:
        modes.append(mode)
        return compiler(function, backend="eager", fullgraph=fullgraph)

    monkeypatch.setattr(torch, "compile", eager)
    outputs = []
    for setting in (CPU, COMPILED):
        torch.manual_seed(0)
        case = decode.decode_static(SHAPE, setting)
        # each of them decodes the same token again
        outputs.append([[variant.forward() for _ in range(2)] for variant in case.variants])
    assert modes == ["reduce-overhead"] * 3
    for by_mode in zip(*outputs, strict=True):
        (first, again), (compiled, compiled_again) = by_mode
        torch.testing.assert_close([again, compiled, compiled_again], [first] * 3)


def test_blocks_of_a_step_are_not_compiled() -> None:
    with pytest.raises(ValueError, match="not --compile-blocks"):
        decode.decode_static(SHAPE, Setting(CPU.device, CPU.dtype, compiled="blocks"))


def test_the_memory_of_a_cache() -> None:
    """Keys and values; with a filter of degree 2 half as much again, and sixteen free rows."""
    case = decode.prefill(SHAPE, CPU)
    plain = 2 * SHAPE.batch * SHAPE.heads * SHAPE.tokens * SHAPE.dim * 4 / 2**20
    held = {variant.name: decode.held_mib(variant.forward()) for variant in case.variants}
    powers = plain / 2 * (SHAPE.tokens + 16) / SHAPE.tokens
    assert held == pytest.approx(
        {"plain": plain, "gfsa degree 1": plain, "gfsa": plain + powers}, rel=1e-6
    )
    assert "the cache of plain" in decode.memory_of_caches(case)
    assert [variant.backend for variant in case.variants] == ["torch", "sdpa", "sdpa"]
