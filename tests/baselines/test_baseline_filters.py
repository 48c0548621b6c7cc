"""AttnScale and NeuTRENO, which are plugged like filters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa.operators import DenseOperator
from gfsa_experiments import baselines
from support.small_baselines import IDS, apply, bert, causal_lm, encoder


class TestAsFilters:
    """``gfsa.plug(model, filter=…)`` for the methods that act on the map."""

    @torch.no_grad()
    def test_attnscale_reads_masks_from_the_operator(self) -> None:
        model = bert().double().eval()
        mask = torch.ones_like(IDS)
        mask[1, 4:] = 0
        outputs = []
        for put in ("apply", "plug"):
            torch.manual_seed(0)
            if put == "apply":
                apply(model, "attnscale")
            else:
                gfsa.plug(model, filter=baselines.AttnScale)
                for parameter in baselines.parameters_of(model):
                    parameter.add_(torch.randn_like(parameter) * 0.5)
            outputs.append(model(IDS, attention_mask=mask).last_hidden_state[mask.bool()])
            baselines.remove(model)
        # a plugged layer reads one row of padding, not a mask of all queries: other sums
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-14)

    @torch.no_grad()
    def test_attnscale_reads_causal_operators_too(self) -> None:
        model = causal_lm()
        gfsa.plug(model, filter=baselines.AttnScale)
        for parameter in baselines.parameters_of(model):
            parameter.fill_(0.5)
        other = IDS.clone()
        other[:, 4:] = 5
        assert torch.equal(model(IDS).logits[:, :4], model(other).logits[:, :4])

    def test_a_ready_made_map_does_not_tell_masks_from_dropout(self) -> None:
        method = baselines.AttnScale(3)
        matrix = torch.eye(4).expand(1, 3, 4, 4)
        with pytest.raises(TypeError, match=r"baselines\.apply\(model, 'attnscale'\)"):
            method(DenseOperator(matrix), torch.randn(1, 3, 4, 2))

    def test_dropout_acts_on_the_map(self) -> None:
        model = encoder()
        gfsa.plug(model, filter=baselines.AttnScale, dropout_after="filter")
        with pytest.raises(ValueError, match="dropout_after='attention'"):
            model(IDS % 9)

    def test_neutreno_needs_the_first_layers_values(self) -> None:
        model = encoder()
        gfsa.plug(model, filter=baselines.NeuTRENO)
        with pytest.raises(RuntimeError, match=r"baselines\.apply\(model, 'neutreno'\)"):
            model(IDS % 9)

    @pytest.mark.parametrize("kind", [baselines.AttnScale, baselines.NeuTRENO])
    def test_they_are_no_polynomials(self, kind: Any) -> None:
        with pytest.raises(TypeError, match="not a polynomial of the attention map"):
            kind(3).coefficients()
        with pytest.raises(TypeError, match="not a polynomial of the attention map"):
            kind(3).fold()


class TestNeuTRENO:
    def test_layers_of_different_stacks_are_refused(self) -> None:
        model = nn.Transformer(12, 3, 1, 1, 20)
        with pytest.raises(ValueError, match=r"stacks: decoder\.layers.*encoder\.layers"):
            baselines.apply(model, "neutreno")
        assert not gfsa.filters_of(model)
        assert len(baselines.apply(model.encoder, "neutreno").plugged) == 1

    @torch.no_grad()
    def test_the_first_layer_is_the_source_although_it_was_not_chosen(self) -> None:
        model = encoder(3)
        plain = model(IDS % 9)
        report = baselines.apply(model, "neutreno", layers=[3], alpha=0.5)
        assert list(report.plugged.values()) == ["the source of v⁰", "its attention's output"]
        changed = model(IDS % 9)
        assert not torch.equal(changed, plain)
        model(torch.flip(IDS % 9, [0]))
        assert torch.equal(model(IDS % 9), changed), "each forward has values of its own"

    def test_a_layer_by_itself_is_refused(self) -> None:
        model = encoder()
        baselines.apply(model, "neutreno")
        with pytest.raises(RuntimeError, match="outside of its model's forward"):
            model.blocks[1](torch.randn(1, 4, 12))
        model(IDS % 9)
        with pytest.raises(RuntimeError, match="outside of its model's forward"):
            model.blocks[0](torch.randn(1, 4, 12))

    def test_a_forward_that_raised_leaves_no_values(self) -> None:
        model = encoder()
        baselines.apply(model, "neutreno")

        def stop(*_: Any) -> None:
            raise KeyError("the second layer")

        handle = model.blocks[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyError, match="the second layer"):
            model(IDS % 9)
        handle.remove()
        with pytest.raises(RuntimeError, match="outside of its model's forward"):
            model.blocks[1](torch.randn(*IDS.shape, 12))
        model(IDS % 9)

    def test_gradients_reach_the_first_layer_through_its_values(self) -> None:
        torch.manual_seed(0)
        model = encoder().double()
        before = _gradient_of_values(model)
        baselines.apply(model, "neutreno")
        assert not torch.equal(_gradient_of_values(model), before)


def _gradient_of_values(model: Any) -> Tensor:
    model.zero_grad()
    model(IDS % 9).sum().backward()
    return model.blocks[0].attention.qkv.weight.grad[24:].clone()
