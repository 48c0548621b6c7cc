"""Training a plugged transformers model with LoRA and other adapters of peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import gfsa
from gfsa.plugs import FilterNotCalledError
from support.zoo import (
    batch_for,
    gradients,
    learned,
    plugged,
    randomise,
    same,
)


class TestLora:
    TARGETS = ("c_attn",)

    def lora(
        self, model: Any, modules_to_save: list[str] | None, exclude: list[str] | None = None
    ) -> peft.PeftModel:
        config = peft.LoraConfig(
            target_modules=list(self.TARGETS),
            modules_to_save=modules_to_save,
            exclude_modules=exclude,
            fan_in_fan_out=True,
            init_lora_weights=False,
        )
        return peft.get_peft_model(model, config)

    def train(self, model: nn.Module, steps: int = 3) -> None:
        groups = gfsa.parameter_groups(model, lr=1e-2, filter_lr=1e-1)
        optimizer = torch.optim.AdamW(groups)
        for _ in range(steps):
            optimizer.zero_grad()
            gradients(model, batch_for("gpt2"))
            optimizer.step()

    def output(self, model: Any) -> Tensor:
        with torch.no_grad():
            return model.eval()(**batch_for("gpt2"))[0]

    def test_trained_saved_merged_and_reloaded(self, tmp_path: Path) -> None:
        base = plugged("gpt2")
        untrained = learned(base)
        model = self.lora(base, modules_to_save=["gfsa"])
        self.train(model)
        trained = learned(model)
        # what filters_of gives is the copy that peft trains, not the original beside it
        assert len(trained) == 2
        assert all(
            (a != b).all() for a, b in zip(trained.values(), untrained.values(), strict=True)
        )
        expected = self.output(model)
        with model.disable_adapter():
            assert not torch.allclose(self.output(model), expected)

        model.save_pretrained(tmp_path / "adapter")
        reloaded = peft.PeftModel.from_pretrained(plugged("gpt2"), str(tmp_path / "adapter"))
        assert same(learned(reloaded), trained)
        assert torch.equal(self.output(reloaded), expected)

        merged = reloaded.merge_and_unload()
        assert list(learned(merged)) == list(untrained)
        assert same(dict(zip(trained, learned(merged).values(), strict=True)), trained)
        assert (self.output(merged) - expected).abs().max() < 1e-5

        merged.save_pretrained(tmp_path / "merged")
        whole = gfsa.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "merged")
        assert torch.equal(self.output(whole), self.output(merged))

    def test_while_the_adapter_is_disabled_the_filters_are_those_that_run(
        self, tmp_path: Path
    ) -> None:
        base = plugged("gpt2")
        untrained = learned(base)
        model = self.lora(base, modules_to_save=["gfsa"])
        self.train(model)
        trained = learned(model)
        with model.disable_adapter():
            assert same(dict(zip(untrained, learned(model).values(), strict=True)), untrained)
            gfsa.save(model, tmp_path)
            (measured,) = gfsa.diagnose(model.eval(), batch_for("gpt2")).models.values()
            assert len(measured.attention) == 2
        assert same(learned(model), trained)
        again = plugged("gpt2")
        gfsa.unplug(again)
        gfsa.load(again, tmp_path)
        assert same(learned(again), untrained)

    def test_plugged_after_lora(self, tmp_path: Path) -> None:
        """How they are saved beside the adapter: test_filters_beside_an_adapter."""
        unplugged = plugged("gpt2")
        gfsa.unplug(unplugged)
        model = self.lora(unplugged, modules_to_save=None)
        before = self.output(model)
        gfsa.plug(model, K=3)
        assert torch.equal(self.output(model), before)
        self.train(model)
        expected = self.output(model)
        assert all((theta != 0).all() for theta in learned(model).values())
        gfsa.save(model, tmp_path / "filters")
        merged = model.merge_and_unload()
        assert (self.output(merged) - expected).abs().max() < 1e-5
        merged.save_pretrained(tmp_path / "merged")
        whole = gfsa.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "merged")
        assert torch.equal(self.output(whole), self.output(merged))
        gfsa.unplug(whole)
        gfsa.load(whole, tmp_path / "filters")
        assert torch.equal(self.output(whole), self.output(merged))

    def test_a_filter_that_peft_wraps_is_still_watched(self) -> None:
        base = plugged("gpt2")
        model = self.lora(base, modules_to_save=["gfsa"])
        attention = base.transformer.h[1].attn
        attention.config = attention.config.real
        with pytest.raises(FilterNotCalledError, match=r"transformer\.h\.1\.attn:"):
            model(**batch_for("gpt2"))

    def test_unplugging_what_peft_wraps_is_refused(self) -> None:
        model = self.lora(plugged("gpt2"), modules_to_save=["gfsa"])
        with pytest.raises(ValueError, match="merge_and_unload"):
            gfsa.unplug(model)
        merged = model.merge_and_unload()
        gfsa.unplug(merged)
        assert not gfsa.filters_of(merged)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("name", "task"), [("gpt2", "CAUSAL_LM"), ("llama", "CAUSAL_LM"), ("t5", "SEQ_2_SEQ_LM")]
)
def test_prefix_tuning_is_refused(name: str, task: str, training: bool) -> None:
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type=task)
    model = peft.get_peft_model(plugged(name), config).train(training)
    with pytest.raises(ValueError, match="prefix tuning"):
        model(**batch_for(name))


def test_prefix_tuning_with_degree_one() -> None:
    base = plugged("gpt2")
    gfsa.unplug(base)
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).eval()
    expected = model(**batch_for("gpt2")).logits
    gfsa.plug(base, degree=1)
    assert torch.equal(model(**batch_for("gpt2")).logits, expected)
    randomise(base)
    assert not torch.allclose(model(**batch_for("gpt2")).logits, expected)


def test_lora_inside_torchs_attention_comes_before_the_filters(tmp_path: Path) -> None:
    """peft merges its weights for the call, and the plugged module under it is called as ever."""

    def adapted() -> Any:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        model: Any = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        config = peft.LoraConfig(target_modules=["self_attn"], r=2, init_lora_weights=False)
        return peft.get_peft_model(model, config)

    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    model, expected = adapted(), adapted()(x)
    gfsa.plug(model)
    torch.testing.assert_close(model(x), expected)
    model(x).square().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert len([name for name in trained if name.endswith("gfsa.theta")]) == 2
    assert any("lora_A" in name for name in trained)
    with torch.no_grad():
        for filter in gfsa.filters_of(model).values():
            filter.theta.normal_(std=0.3)
    filtered = model.eval()(x)
    assert (filtered - expected).abs().max() > 1e-3
    gfsa.save(model, tmp_path)
    again = adapted().eval()
    gfsa.load(again, tmp_path)
    torch.testing.assert_close(again(x), filtered)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x), filtered)
    gfsa.unplug(merged)
    gfsa.load(merged, tmp_path)
    torch.testing.assert_close(merged(x), filtered)
