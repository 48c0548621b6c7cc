"""The suite of pretraining steps, on decoders small enough for a CPU."""

from __future__ import annotations

import pytest
import torch

from gfsa_benchmarks import pretraining, run_suite
from gfsa_benchmarks.case import Setting, Shape
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig
from support.counting import Counting

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


@pytest.mark.parametrize(
    ("shape", "size"), [("64x5x32x64", "15m"), ("1x8x32x64", "46m"), ("32x12x32x64", "110m")]
)
def test_heads_of_a_size_of_the_recipe_are_that_size(shape: str, size: str) -> None:
    config = PretrainConfig(size=size, block=32)  # type: ignore[arg-type]
    sizes = pretraining.decoder_sizes(Shape.parse(shape))
    assert sizes == config.sizes(64)
    other = pretraining.decoder_sizes(Shape.parse("1x6x32x32"))
    assert (other.depth, other.width, other.mlp) == (2, 192, 512)


@pytest.mark.parametrize("compiled", ["model", "blocks"])
def test_one_graph_for_forward_and_step(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph without gradients would be compiled for the forward's time alone."""
    monkeypatch.setattr(pretraining, "ARMS", {"plain": None, "gfsa": {"K": 3}})
    compiler, counting = torch.compile, Counting()
    monkeypatch.setattr(
        torch, "compile", lambda call, backend=counting: compiler(call, backend=backend)
    )
    setting = Setting(CPU, torch.float32, compiled=compiled)  # type: ignore[arg-type]
    with run_suite.compiling():
        case = pretraining.pretraining_step(Shape.parse("1x2x8x4"), setting)
        assert [variant.backend for variant in case.variants] == ["torch", "sdpa"]
        for count, variant in enumerate(case.variants, 1):
            before = variant.forward()
            assert counting.graphs == count
            assert variant.step is not None
            variant.step()
            assert not torch.equal(variant.forward(), before)
            assert counting.graphs == count


def test_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="no padding"):
        pretraining.pretraining_step(
            Shape.parse("1x2x8x4:causal:padded"), Setting(CPU, torch.float32)
        )
