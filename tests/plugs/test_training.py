"""Training a plugged transformers model, eager and compiled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from torch import Tensor

import gfsa
from support.measuring import Counting
from support.zoo import (
    MODELS,
    VOCABULARY,
    batch_for,
    configuration,
    gradients,
    learned,
    plugged,
    randomise,
    same,
)


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


def examples(count: int = 16) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(3, VOCABULARY, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.mark.usefixtures("accelerate_alone")
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


class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh(self) -> Iterator[None]:
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    # evaluation of the other models: test_a_new_length_is_no_new_graph, tests/scale/test_compile.py
    @pytest.mark.parametrize(
        ("name", "training", "dropout"),
        [
            *((name, True, 0.2) for name in MODELS),
            ("gpt2", False, 0.0),
        ],
    )
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

    @pytest.mark.parametrize("how", ["wrapper", "in place"])
    def test_blocks_are_compiled_once(self, how: str) -> None:
        model, batch = plugged("bert", layers=2), batch_for("bert")
        backend = Counting()
        layers = model.bert.encoder.layer
        for place, layer in enumerate(layers):
            if how == "in place":
                layer.compile(backend=backend)
            else:
                layers[place] = torch.compile(layer, backend=backend)
        counts = []
        with torch.no_grad():
            for _ in range(3):
                model(**batch)
                counts.append(backend.graphs)
        # what the first forward checks is no reason to compile again in the second
        assert counts[0] > 0
        assert counts == counts[:1] * 3
        # nor is what a copy does that is not compiled
        if how == "in place":
            other = copy.deepcopy(model)
            for layer in other.bert.encoder.layer:
                layer._compiled_call_impl = None
            with torch.no_grad():
                other(**batch)
                model(**batch)
            assert backend.graphs == counts[0]

    @pytest.mark.slow
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
