"""The suite of whole training steps, on models small enough for a CPU."""

import pytest
import torch

from gfsa.bench import training
from gfsa.bench.case import Setting, Shape

pytest.importorskip("transformers")


@pytest.mark.parametrize("text", ["1x2x8x4", "1x2x8x4:causal", "1x2x197x4"])
def test_every_kind_of_model(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LAYERS", 2)
    setting = Setting(torch.device("cpu"), torch.float32)
    case = training.training_step(Shape.parse(text), setting)
    assert [(v.name, v.backend) for v in case.variants] == [
        ("plain", "torch"),
        ("gfsa", "sdpa"),
        ("gfsa even layers", "sdpa"),
        ("gfsa sdpa", "sdpa"),
    ]
    # a filter starts as the model it is put into, and training moves every one of them
    losses = [variant.forward() for variant in case.variants]
    for variant, loss in zip(case.variants, losses, strict=True):
        assert torch.isfinite(loss)
        variant.step()
        assert not torch.equal(variant.forward(), loss)
