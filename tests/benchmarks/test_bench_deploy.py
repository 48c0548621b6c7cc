"""The deploy suite: three ways to run one encoder give one answer."""

from __future__ import annotations

import pytest
import torch

from gfsa_benchmarks.case import Setting, Shape
from gfsa_benchmarks.deploy import deploy

CPU = Setting(torch.device("cpu"), torch.float32)


def test_an_encoder_is_not_causal():
    with pytest.raises(ValueError, match="neither causal nor padded"):
        deploy(Shape(1, 2, 6, 4, causal=True), CPU)


@pytest.mark.slow
def test_every_way_gives_what_eager_mode_gives():
    case = deploy(Shape(1, 2, 6, 4), CPU)
    answers = {}
    for variant in case.variants:
        answer = variant.forward()
        answer = answer if isinstance(answer, torch.Tensor) else torch.from_numpy(answer[0])
        answers[variant.name, variant.backend] = answer
    assert {backend for _, backend in answers} == {"eager", "inductor", "onnxruntime"}
    for (name, backend), answer in answers.items():
        torch.testing.assert_close(
            answer, answers[name, "eager"], rtol=1e-4, atol=1e-4, msg=f"{name}, {backend}"
        )
    assert not torch.allclose(answers["plain", "eager"], answers["gfsa", "eager"])
