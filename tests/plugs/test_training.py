"""Training a plugged transformers model with the tools people train with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn

import gfsa
from gfsa.plugs import FilterNotCalledError
from support.zoo import VOCABULARY, ZOO

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

MODELS = ("bert", "gpt2", "vit", "llama")
_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout")
_OTHER_DROPOUT = ("hidden_dropout_prob", "resid_pdrop", "embd_pdrop")


def configuration(name: str) -> Any:
    return copy.deepcopy(ZOO[name].model("sdpa").config)


def plugged(
    name: str,
    dropout: float | None = None,
    implementation: str = "sdpa",
    layers: int = 2,
) -> Any:
    """A tiny float32 model with filters that do something, in evaluation mode."""
    torch.manual_seed(0)
    config = configuration(name)
    for option in _ATTENTION_DROPOUT + _OTHER_DROPOUT:
        if dropout is not None and hasattr(config, option):
            setattr(config, option, dropout)
    config.num_hidden_layers = layers
    config._attn_implementation = implementation
    model = type(ZOO[name].model(implementation))(config).eval()
    assert model.config._attn_implementation == implementation
    gfsa.plug(model, K=3)
    randomise(model)
    return model


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    for filter in gfsa.filters_of(model).values():
        with torch.no_grad():
            filter.theta.copy_(torch.randn(filter.theta.shape, generator=generator) * 0.3)


def batch_for(name: str) -> dict[str, Tensor]:
    return ZOO[name].inputs()


def learned(model: nn.Module) -> dict[str, Tensor]:
    return {name: f.theta.detach().clone() for name, f in gfsa.filters_of(model).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model(**batch)[0].square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class TestParameterGroups:
    def test_every_trainable_parameter_is_there_once(self) -> None:
        model = plugged("bert")
        model.bert.embeddings.requires_grad_(False)
        groups = gfsa.parameter_groups(model, lr=1e-4, filter_lr=1e-2, weight_decay=0.1)
        grouped = [id(p) for group in groups for p in group["params"]]
        assert len(grouped) == len(set(grouped))
        assert set(grouped) == {id(p) for p in model.parameters() if p.requires_grad}

    def test_filters_have_a_rate_of_their_own_and_no_decay(self) -> None:
        model = plugged("bert")
        groups = gfsa.parameter_groups(model, lr=1e-4, filter_lr=1e-2, weight_decay=0.1)
        by_name = {group["name"]: group for group in groups}
        assert {id(p) for p in by_name["filters"]["params"]} == {
            id(f.theta) for f in gfsa.filters_of(model).values()
        }
        settings = {name: (g["lr"], g["weight_decay"]) for name, g in by_name.items()}
        assert settings == {
            "weights": (1e-4, 0.1),
            "biases": (1e-4, 0.0),
            "filters": (1e-2, 0.0),
        }
        assert all(p.dim() <= 1 for p in by_name["biases"]["params"])

    def test_the_filters_follow_the_model_unless_told(self) -> None:
        groups = gfsa.parameter_groups(plugged("bert"), lr=1e-4)
        assert [group["lr"] for group in groups] == [1e-4] * 3

    def test_a_shared_layer_is_grouped_once(self) -> None:
        model = plugged("albert")
        groups = gfsa.parameter_groups(model, lr=1e-4)
        assert len(next(g for g in groups if g["name"] == "filters")["params"]) == 1

    def test_an_optimiser_takes_them(self) -> None:
        model = plugged("gpt2")
        before = learned(model)
        optimizer = torch.optim.AdamW(gfsa.parameter_groups(model, lr=0.0, filter_lr=1e-2))
        weights = {n: p.detach().clone() for n, p in model.named_parameters() if "gfsa" not in n}
        gradients(model, batch_for("gpt2"))
        optimizer.step()
        # the first step of Adam moves each number by its rate
        for name, theta in learned(model).items():
            moved = (theta - before[name]).abs()
            assert torch.allclose(moved, torch.full_like(moved, 1e-2), rtol=1e-2)
        assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if n in weights)

    def test_frozen_filters_with_a_rate_are_an_error(self) -> None:
        model = plugged("bert")
        for filter in gfsa.filters_of(model).values():
            filter.requires_grad_(False)
        assert "filters" not in [g["name"] for g in gfsa.parameter_groups(model, lr=1e-4)]
        with pytest.raises(ValueError, match=r"filter_lr=0\.01 has nothing to act on"):
            gfsa.parameter_groups(model, lr=1e-4, filter_lr=1e-2)

    def test_a_model_without_filters_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="has no filters"):
            gfsa.parameter_groups(ZOO["bert"].model("sdpa"), lr=1e-4)


def test_training_the_filters_alone() -> None:
    model = plugged("llama")
    model.requires_grad_(False)
    for filter in gfsa.filters_of(model).values():
        filter.requires_grad_(True)
    groups = gfsa.parameter_groups(model, lr=1e-4, filter_lr=1e-2)
    assert [group["name"] for group in groups] == ["filters"]
    optimizer = torch.optim.SGD(groups)
    before = copy.deepcopy(model.state_dict())
    assert all(".gfsa." in name for name in gradients(model, batch_for("llama")))
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (not name.endswith(".gfsa.theta")), name


class TestCheckpointing:
    """Activations thrown away and computed again: the same gradients, the same dropout."""

    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", [*MODELS, "t5"])
    def test_gradients_are_the_same(self, name: str, implementation: str, reentrant: bool) -> None:
        model = plugged(name, dropout=0.1, implementation=implementation).double().train()
        batch = {
            key: x.double() if x.is_floating_point() else x for key, x in batch_for(name).items()
        }
        expected = gradients(copy.deepcopy(model), batch)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant and name != "vit":
            model.enable_input_require_grads()
        found = gradients(model, batch)
        assert found.keys() == expected.keys()
        for parameter, gradient in expected.items():
            assert torch.allclose(found[parameter], gradient, rtol=1e-6, atol=1e-12), parameter

    def test_layers_are_computed_again(self) -> None:
        # what the tests above would not notice: checkpointing that is switched on but not done
        model = plugged("bert").train()
        calls = []
        filter = next(iter(gfsa.filters_of(model).values()))
        filter.register_forward_hook(lambda *_: calls.append(1))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        gradients(model, batch_for("bert"))
        assert len(calls) == 2


class TestAutocast:
    @pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", [*MODELS, "t5"])
    def test_bfloat16(self, name: str, implementation: str, training: bool) -> None:
        model, batch = plugged(name, implementation=implementation), batch_for(name)
        gfsa.unplug(model)
        model.train(training)

        def run() -> Tensor:
            torch.manual_seed(5)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(**batch)[0]

        expected = run()
        gfsa.plug(model, K=3)
        found = run()
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)

        found.float().square().mean().backward()
        for layer, filter in gfsa.filters_of(model).items():
            # θ stays in float32, where small steps are not lost
            assert filter.theta.dtype == filter.theta.grad.dtype == torch.float32
            assert filter.theta.grad.isfinite().all(), layer
            assert (filter.theta.grad != 0).all(), layer

    def test_filters_that_do_something_stay_close_to_float32(self) -> None:
        model, batch = plugged("bert"), batch_for("bert")
        exact = model(**batch)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = model(**batch)[0]
        assert rounded.dtype == torch.bfloat16
        assert (rounded.float() - exact).abs().max() < 0.02 * exact.abs().max()


class Counting:
    """A compiler backend that runs the graph as it is and counts how often it was asked."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh(self) -> Iterator[None]:
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @pytest.mark.parametrize(
        ("training", "dropout"),
        [(False, 0.0), (True, 0.0), (True, 0.2)],
        ids=["eval", "train", "train-dropout"],
    )
    @pytest.mark.parametrize("name", MODELS)
    def test_one_graph(self, name: str, training: bool, dropout: float) -> None:
        model = plugged(name, dropout=dropout, layers=1).train(training)
        batch = batch_for(name)
        compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
        torch.manual_seed(3)
        expected = model(**batch)[0]
        torch.manual_seed(3)
        found = compiled(**batch)[0]
        # under dropout too: the compiled graph draws the masks that eager mode draws
        assert (found - expected).abs().max() < 1e-6
        if training:
            expected.square().mean().backward()
            found.square().mean().backward()
            for (layer, ours), theirs in zip(
                gfsa.filters_of(model).items(), gfsa.filters_of(compiled).values(), strict=True
            ):
                assert torch.allclose(ours.theta.grad, theirs.theta.grad, rtol=1e-4), layer

    def test_a_graph_made_before_plugging_is_made_again(self) -> None:
        model, batch = plugged("llama", layers=1), batch_for("llama")
        gfsa.unplug(model)
        compiled = torch.compile(model, fullgraph=True, backend=Counting())
        with torch.no_grad():
            before = compiled(**batch)[0]
            gfsa.plug(compiled, K=3, w0=0.5)
            assert (compiled(**batch)[0] - model(**batch)[0]).abs().max() < 1e-6
            assert (compiled(**batch)[0] - before).abs().max() > 1e-3
            gfsa.unplug(compiled)
            assert torch.equal(compiled(**batch)[0], before)

    @pytest.mark.parametrize("how", ["wrapper", "in place", "forward", "part"])
    def test_however_a_model_is_compiled_its_filters_count_as_called(self, how: str) -> None:
        model, batch = plugged("bert", layers=1), batch_for("bert")
        # the check of the first forward is still to come
        backend = Counting()
        if how == "wrapper":
            gfsa.unplug(model)
            model = torch.compile(model, backend=backend)
            gfsa.plug(model)
        elif how == "in place":
            model.compile(backend=backend)
        elif how == "forward":
            model.forward = torch.compile(model.forward, backend=backend)
        else:
            layers = model.bert.encoder.layer
            layers[0] = torch.compile(layers[0], backend=backend)
        with torch.no_grad():
            model(**batch)
        assert backend.graphs > 0

    def test_inductor(self) -> None:
        # one small model: the C++ compiler takes the time, with or without filters
        config = configuration("bert")
        config.num_hidden_layers = 1
        model = transformers.BertModel(config, add_pooling_layer=False).eval()
        gfsa.plug(model, K=3)
        randomise(model)
        batch = batch_for("bert")
        with torch.no_grad():
            expected = model(**batch)[0]
            found = torch.compile(model, fullgraph=True)(**batch)[0]
        assert (found - expected).abs().max() < 1e-5

    @pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
    def test_a_new_length_is_no_new_graph(self, name: str) -> None:
        model = plugged(name, layers=1)
        counting = Counting()
        compiled = torch.compile(model, fullgraph=True, backend=counting)
        for length in (6, 9, 13, 20, 31):
            ids = torch.randint(3, VOCABULARY, (2, length))
            with torch.no_grad():
                found = compiled(input_ids=ids)[0]
                expected = model(input_ids=ids)[0]
            assert (found - expected).abs().max() < 1e-6
        # one for the first length, one for all lengths
        assert counting.graphs == 2


def examples(count: int = 16) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(3, VOCABULARY, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.fixture
def _accelerate_alone() -> Iterator[None]:
    """Trainer and Accelerator keep their settings in process-wide singletons."""

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("_accelerate_alone")
class TestTrainer:
    def trainer(self, model: Any, folder: Path, **options: Any) -> transformers.Trainer:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            save_steps=2,
            logging_steps=100,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
        )
        return transformers.Trainer(model, arguments, train_dataset=examples(), **options)

    def fresh(self) -> Any:
        model = plugged("gpt2", dropout=0.1)
        return model.train()

    def test_filters_learn(self, tmp_path: Path) -> None:
        model = self.fresh()
        before = learned(model)
        self.trainer(model, tmp_path).train()
        for name, theta in learned(model).items():
            assert (theta != before[name]).all(), name
            assert theta.isfinite().all(), name

    def test_a_run_that_is_resumed_ends_where_it_would_have(self, tmp_path: Path) -> None:
        whole = self.fresh()
        self.trainer(whole, tmp_path / "whole").train()

        resumed = self.fresh()
        halfway = tmp_path / "whole" / "checkpoint-2"
        self.trainer(resumed, tmp_path / "resumed").train(resume_from_checkpoint=str(halfway))
        assert same(learned(resumed), learned(whole))

    def test_its_checkpoints_are_models(self, tmp_path: Path) -> None:
        model = self.fresh()
        self.trainer(model, tmp_path).train()
        loaded = gfsa.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "checkpoint-4")
        assert same(learned(loaded), learned(model))
        batch = batch_for("gpt2")
        assert torch.equal(loaded.eval()(**batch)[0], model.eval()(**batch)[0])

    def test_with_a_learning_rate_for_the_filters(self, tmp_path: Path) -> None:
        model = self.fresh()
        before = learned(model)
        groups = gfsa.parameter_groups(model, lr=1e-5, filter_lr=1e-2, weight_decay=0.01)
        trainer = self.trainer(model, tmp_path, optimizers=(torch.optim.AdamW(groups), None))
        trainer.train()
        # the schedule falls linearly over four steps: 1 + 3/4 + 2/4 + 1/4 rates at the most
        distance = max((theta - before[name]).abs().max() for name, theta in learned(model).items())
        assert 1e-2 < distance <= 2.5e-2 * 1.01
        assert {g["initial_lr"] for g in trainer.optimizer.param_groups} == {1e-5, 1e-2}


@pytest.mark.usefixtures("_accelerate_alone")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = plugged("gpt2").train()
    optimizer = torch.optim.AdamW(gfsa.parameter_groups(model, lr=1e-4, filter_lr=1e-2))
    loader = torch.utils.data.DataLoader(examples(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    before = learned(model)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    after = learned(model)
    assert all((after[name] != before[name]).all() for name in before)

    gfsa.save(model, tmp_path)
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    gfsa.unplug(bare)
    gfsa.load(bare, tmp_path)
    assert same(learned(bare), after)


class TestLora:
    TARGETS = ("c_attn",)

    def lora(self, model: Any, modules_to_save: list[str] | None) -> peft.PeftModel:
        config = peft.LoraConfig(
            target_modules=list(self.TARGETS),
            modules_to_save=modules_to_save,
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

    def test_without_modules_to_save_the_filters_are_frozen(self) -> None:
        model = self.lora(plugged("gpt2"), modules_to_save=None)
        assert not any(f.theta.requires_grad for f in gfsa.filters_of(model).values())
        with pytest.raises(ValueError, match=r"modules_to_save=\['gfsa'\]"):
            gfsa.parameter_groups(model, lr=1e-3, filter_lr=1e-2)

    def test_plugged_after_lora(self, tmp_path: Path) -> None:
        unplugged = plugged("gpt2")
        gfsa.unplug(unplugged)
        model = self.lora(unplugged, modules_to_save=None)
        before = self.output(model)
        gfsa.plug(model, K=3)
        assert torch.equal(self.output(model), before)
        self.train(model)
        trained, expected = learned(model), self.output(model)
        assert all((theta != 0).all() for theta in trained.values())

        # peft does not know these filters: they are saved on their own, and go into the bare model
        model.save_pretrained(tmp_path / "adapter")
        gfsa.save(model, tmp_path / "filters")
        again = plugged("gpt2")
        gfsa.unplug(again)
        again = peft.PeftModel.from_pretrained(again, str(tmp_path / "adapter"))
        gfsa.load(again, tmp_path / "filters")
        assert torch.equal(self.output(again), expected)

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
    with pytest.raises(ValueError, match=r"prefix tuning.* cannot be combined with a filter"):
        model(**batch_for(name))
