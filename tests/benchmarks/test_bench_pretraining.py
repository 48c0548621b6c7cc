"""The suite of pretraining steps, on decoders small enough for a CPU."""

from __future__ import annotations

import pytest
import torch

from gfsa_benchmarks import pretraining
from gfsa_benchmarks.case import Setting, Shape
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig

pytest.importorskip("transformers")

CPU = torch.device("cpu")
NAMES = [*pretraining.ARMS]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "LAYERS", 2)
    monkeypatch.setattr(pretraining, "VOCABULARY", 64)


def test_filters_start_as_the_plain_model_and_learn() -> None:
    setting = Setting(CPU, torch.float32)
    case = pretraining.pretraining_step(Shape.parse("2x2x8x4"), setting)
    # rows of pretraining are causal whether the shape says so or not
    assert case.shape == "2x2x8x4:causal"
    assert [(v.name, v.backend) for v in case.variants] == [
        (name, "torch" if name == "plain" else "sdpa") for name in NAMES
    ]
    losses = [variant.forward() for variant in case.variants]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])
    # the exclusive term is another model at once, the depth term beside it starts at zero
    assert losses[3] != losses[0]
    assert torch.equal(losses[3], losses[4])
    for _ in range(3):
        for variant in case.variants:
            assert variant.step is not None
            variant.step()
    after = [variant.forward() for variant in case.variants]
    # every step learns; the models no longer agree
    assert all(end < start for end, start in zip(after, losses, strict=True))
    assert len({float(loss) for loss in after}) == len(NAMES)


def test_the_step_is_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 as the recipe has it, tokens predicted from those before, gradients clipped."""
    clipped: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def watched(parameters: object, most: float, **options: object) -> object:
        clipped.append(most)
        return clip(parameters, most, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", watched)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def loss(self: object, logits: torch.Tensor, labels: torch.Tensor, **_: object) -> torch.Tensor:
        seen.append((logits, labels))
        return logits.float().square().mean()

    monkeypatch.setattr(pretraining.NextTokenLoss, "__call__", loss)
    case = pretraining.pretraining_step(Shape.parse("2x2x8x4"), Setting(CPU, torch.bfloat16))
    seen.clear()
    plain = case.variants[0]
    assert plain.step is not None
    plain.step()
    (logits, labels) = seen[0]
    assert logits.dtype == torch.bfloat16
    assert labels.shape == (2, 8)
    assert clipped == [PretrainConfig.clip]


def test_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="no padding"):
        pretraining.pretraining_step(
            Shape.parse("1x2x8x4:causal:padded"), Setting(CPU, torch.float32)
        )
