"""Each comparison method against its formula, dense and in float64, inside whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gfsa_experiments import baselines
from support import dense_blocks as dense
from support.dense_blocks import Dense
from support.families import FAMILIES, LENGTHS

TAU = 0.7


def allowed_pairs(length: int, causal: bool = False) -> Tensor:
    pairs = torch.ones(1, length, length, dtype=torch.bool)
    return pairs.tril() if causal else pairs


def bert_case(family: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor], Any, Tensor]:
    """A model, how it is run, its reference ``(model, method) -> outputs`` and who sees whom."""
    length = LENGTHS[0]
    known = FAMILIES[family]()
    model = known.model()
    run = lambda m: known.run(m, [0])[0]  # noqa: E731
    ids = torch.randint(3, 30, (1, length), generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, length, 12, generator=rng, dtype=torch.float64)
    if family == "DeiT":
        pixels = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0)).double()
        allowed = allowed_pairs(17)
        return model, run, lambda m, how: dense.vit(m, pixels[None], allowed, how)[0], allowed
    if family == "BERT":
        allowed = allowed_pairs(length)
        return model, run, lambda m, how: dense.bert(m, ids, allowed, how)[0], allowed
    if family == "GPT-2":
        allowed = allowed_pairs(length, causal=True)
        return model, run, lambda m, how: dense.gpt2(m, ids, allowed, how)[0], allowed
    allowed = allowed_pairs(length)
    return model, run, lambda m, how: dense.torch_encoder(m, tokens, allowed, how)[0], allowed


@pytest.fixture(params=["BERT", "GPT-2", "DeiT", "torch, norms last", "torch, norms first"])
def case(request: pytest.FixtureRequest) -> Any:
    return bert_case(request.param)


@torch.no_grad()
def check(case: Any, name: str, method: Callable[[nn.Module], Dense], **options: Any) -> None:
    model, run, reference, _ = case
    plain = reference(model, Dense())
    baselines.apply(model, name, **options)
    rng = torch.Generator().manual_seed(5)
    for parameter in baselines.parameters_of(model):
        parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.5)
    got = run(model)
    expected_method = method(model)
    baselines.remove(model)
    assert (run(model) - plain).abs().max() <= 1e-10, "the reference is the model"
    expected = reference(model, expected_method)
    assert (expected - plain).abs().max() > 1e-4
    assert (got - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("multiplier", [1.0, 3.0])
def test_attnscale(case: Any, multiplier: float) -> None:
    def method(model: nn.Module) -> Dense:
        scales = [multiplier * p.detach()[:, 0] for p in baselines.parameters_of(model)]
        return Dense(on_map=lambda i, matrix: dense.attnscale(matrix, case[3], scales[i]))

    check(case, "attnscale", method, lr_multiplier=multiplier)


def test_neutreno(case: Any) -> None:
    def method(model: nn.Module) -> Dense:
        first: list[Tensor] = []

        def pulled(layer: int, y: Tensor, v: Tensor) -> Tensor:
            if layer == 0:
                first.append(v)
            return y + 0.4 * (first[-1] - v)

        return Dense(on_values=pulled)

    check(case, "neutreno", method, alpha=0.4)


def test_featscale(case: Any) -> None:
    def method(model: nn.Module) -> Dense:
        numbers = [p.detach().clone() for p in baselines.parameters_of(model)]

        def scaled(layer: int, which: str, y: Tensor) -> Tensor:
            if which != "attention":
                return y
            return dense.featscale(y, case[3], *numbers[2 * layer : 2 * layer + 2])

        return Dense(on_branch=scaled)

    check(case, "featscale", method)


def test_layerscale(case: Any) -> None:
    def method(model: nn.Module) -> Dense:
        numbers = [p.detach().clone() for p in baselines.parameters_of(model)]
        place = ["attention", "mlp"]
        return Dense(on_branch=lambda i, which, y: numbers[2 * i + place.index(which)] * y)

    check(case, "layerscale", method)


def test_contranorm_of_bert(case: Any) -> None:
    # the norm that comes next after attention: the first one if norms come last
    after = 0 if hasattr(case[0], "encoder") or _norms_last(case[0]) else 1

    def pushed(layer: int, which: int, x: Tensor) -> Tensor:
        return dense.contranorm(x, case[3], 0.3, TAU, "bert") if which == after else x

    check(case, "contranorm", lambda m: Dense(on_norm=pushed), scale=0.3, temperature=TAU)


def test_contranorm_of_vit(case: Any) -> None:
    def pushed(layer: int, which: int, x: Tensor) -> Tensor:
        return dense.contranorm(x, case[3], 0.3, TAU, "vit")

    options = {"scale": 0.3, "temperature": TAU, "form": "vit"}
    check(case, "contranorm", lambda m: Dense(on_norm=pushed), **options)


def _norms_last(model: Any) -> bool:
    return isinstance(model, nn.TransformerEncoder) and not model.layers[0].norm_first


def test_defaults_are_the_published_ones() -> None:
    options = {name: method.options for name, method in baselines.METHODS.items()}
    assert options == {
        "attnscale": {"lr_multiplier": 1.0},
        "contranorm": {"scale": 0.01, "form": "bert", "temperature": 1.0},
        "featscale": {},
        "layerscale": {"init": 1e-5},
        "neutreno": {"alpha": 0.6},
    }
    layer = baselines.LayerScale(4)
    assert torch.equal(layer.gamma, torch.full((4,), 1e-5))
