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


Case = tuple[nn.Module, Callable[[nn.Module], Tensor], Callable[..., Tensor], Tensor]
"""A model, how it is run, its reference ``(model, method) -> outputs`` and who sees whom."""


def case_of(family: str) -> Case:
    known, rng = FAMILIES[family](), torch.Generator().manual_seed(0)
    length = 17 if family == "DeiT" else LENGTHS[0]
    forward: Callable[..., Tensor]
    if family == "DeiT":
        forward, x = dense.vit, torch.randn(1, 3, 16, 16, generator=rng).double()
    elif family in ("BERT", "GPT-2"):
        forward = dense.bert if family == "BERT" else dense.gpt2
        x = torch.randint(3, 30, (1, length), generator=rng)
    else:
        forward = dense.torch_encoder
        x = torch.randn(1, length, 12, generator=rng, dtype=torch.float64)
    allowed = torch.ones(1, length, length, dtype=torch.bool)
    allowed = allowed.tril() if family == "GPT-2" else allowed
    run = lambda model: known.run(model, [0])[0]  # noqa: E731
    return known.model(), run, lambda model, how: forward(model, x, allowed, how)[0], allowed


@pytest.fixture(params=["BERT", "GPT-2", "DeiT", "torch, norms last", "torch, norms first"])
def case(request: pytest.FixtureRequest) -> Any:
    return case_of(request.param)


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
