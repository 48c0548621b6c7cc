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


def test_what_is_timed_as_compiled_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def compiler(function: Any, mode: str, fullgraph: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(mode)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", compiler)
    outputs = []
    for setting in (CPU, COMPILED):
        torch.manual_seed(0)
        case = decode.decode_static(SHAPE, setting)
        # each of them decodes the same token again
        outputs.append([variant.forward() for variant in case.variants for _ in range(2)])
    assert calls == ["reduce-overhead"] * 6
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0][::2], outputs[0][1::2])


def test_fewer_heads_of_keys_are_those_of_the_model() -> None:
    case = decode.prefill(Shape.parse("1x4/2x10x8"), CPU)
    for variant in case.variants:
        (layer,) = variant.forward().layers
        assert layer.keys.shape == (1, 2, 10, 8)


def test_both_degrees_are_timed_by_both_ways_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool]] = []

    def variant(name: str, *others: Any, kernel: bool) -> Any:
        made.append((name, kernel))

    monkeypatch.setattr(decode, "_variant", variant)
    monkeypatch.setattr(decode, "_models", lambda *_: {"plain": 0, "gfsa degree 1": 1, "gfsa": 2})
    decode.decode(SHAPE, Setting(torch.device("cuda"), torch.bfloat16))
    assert made == [
        *((name, False) for name in ("plain", "gfsa degree 1", "gfsa")),
        *((name, True) for name in ("gfsa degree 1 kernel", "gfsa kernel")),
    ]


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
