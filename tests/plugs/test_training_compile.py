"""Training a plugged transformers model with torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import transformers

import gfsa
from support.counting import Counting
from support.random_filters import randomise
from support.training import MODELS, batch_for, configuration, plugged
from support.zoo import VOCABULARY


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

    # GPT-2: test_one_graph_for_all_sizes of tests/scale/test_compile.py
    def test_a_new_length_is_no_new_graph(self) -> None:
        model = plugged("llama", layers=1)
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
