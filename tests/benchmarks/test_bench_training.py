"""The suite of whole training steps, on models small enough for a CPU."""

import pytest
import torch

from gfsa_benchmarks import command, training
from gfsa_benchmarks.case import Setting, Shape
from support.measuring import Counting

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "text", ["1x2x8x4", "2x2x8x4:padded", "1x2x8x4:causal", "2x2x8x4:causal:padded", "1x2x197x4"]
)
def test_every_kind_of_model(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LAYERS", 2)
    setting = Setting(torch.device("cpu"), torch.float32)
    case = training.training_step(Shape.parse(text), setting)
    assert [(v.name, v.backend) for v in case.variants] == [
        ("plain", "torch"),
        ("gfsa degree 1", "sdpa"),
        ("gfsa exclusive", "sdpa"),
        ("gfsa", "sdpa"),
        ("gfsa sdpa", "sdpa"),
        ("published", "torch"),
    ]
    # a filter starts as the model it is put into, and training moves every one of them
    losses = [variant.forward() for variant in case.variants]
    for variant, loss in zip(case.variants, losses, strict=True):
        assert torch.isfinite(loss)
        variant.step()
        assert not torch.equal(variant.forward(), loss)


def test_the_published_form_gives_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where padding hides keys, and after steps that have moved the filters."""
    monkeypatch.setattr(training, "LAYERS", 2)
    setting = Setting(torch.device("cpu"), torch.float32)
    case = training.training_step(Shape.parse("3x2x9x4:padded"), setting)
    named = {variant.name: variant for variant in case.variants}
    for turn in range(3):
        losses = []
        for name in ("gfsa", "gfsa sdpa", "published"):
            # what models drop outside of attention
            torch.manual_seed(turn)
            losses.append(named[name].forward())
            named[name].step()
        for other in losses[1:]:
            torch.testing.assert_close(other, losses[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", [0, 3])
@pytest.mark.parametrize("text", ["1x2x8x4", "1x2x8x4:causal"])
def test_blocks_are_compiled_by_themselves(
    text: str, variant: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "LAYERS", 3)
    compiler, counting = torch.compile, Counting()
    monkeypatch.setattr(torch, "compile", lambda call: compiler(call, backend=counting))
    setting = Setting(torch.device("cpu"), torch.float32, compiled="blocks")
    assert setting.timing == "compiled blocks"
    with command.compiling():
        case = training.training_step(Shape.parse(text), setting)
        model = case.variants[variant]
        first = model.forward()
        assert counting.graphs == 1
        model.step()
        assert counting.graphs == 2
        assert not torch.equal(model.forward(), first)
        assert counting.graphs == 2


def test_pictures_are_not_padded() -> None:
    setting = Setting(torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="not padded"):
        training.training_step(Shape.parse("1x2x197x4:padded"), setting)


def test_graphs_hold_what_runs_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stream is captured, transformers makes masks that it leaves out otherwise."""
    from transformers.utils import import_utils

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert import_utils.is_tracing()
    with training._no_masks_for_graphs():
        assert not import_utils.is_tracing()
