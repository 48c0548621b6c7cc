"""Pruning: pruned heads skip the second pass, and nothing else changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import gfsa
from gfsa.filters import PartialPolynomial
from gfsa.operators import AttentionOperator, DenseOperator, FunctionOperator
from support.subjects import first
from support.zoo import ZOO

HIGH = {0: [1, 2], 1: []}
"""Layer → heads that keep their second pass in :func:`trained`."""


def trained(model: Any, high: dict[int, list[int]] = HIGH, small: float = 1e-4) -> Any:
    """Coefficients as training leaves them: most of c₂ small, that of some heads not."""
    for layer, filter in enumerate(gfsa.filters_of(model).values()):
        with torch.no_grad():
            filter.theta.normal_(std=0.2)
            filter.theta[:, 2] = small
            filter.theta[high.get(layer, []), 2] = 0.4
    return model


def plugged(name: str, implementation: str = "sdpa") -> Any:
    model = ZOO[name].model(implementation)
    gfsa.plug(model, K=3)
    return trained(model)


class HeadPasses:
    """Counts the heads of every call of torch's attention."""

    def __init__(self) -> None:
        self.count = 0
        self.real = F.scaled_dot_product_attention

    def __call__(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.count += query.shape[-3]
        return self.real(query, *args, **kwargs)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "llama", "t5"])
@torch.no_grad()
def test_outputs_are_those_of_the_pruned_polynomial(name: str, implementation: str) -> None:
    model = plugged(name, implementation)
    inputs = ZOO[name].batch()
    model(**inputs)
    reference = copy.deepcopy(model)
    report = gfsa.prune(model, tolerance=1e-3, inputs=inputs)

    # the same polynomial, every pass on every head
    for (layer, filter), pruned in zip(
        gfsa.filters_of(reference).items(), gfsa.filters_of(model).values(), strict=True
    ):
        wanted = filter.coefficients().clone()
        low = wanted[:, 2].abs() <= 1e-3
        wanted[low, 1] += wanted[low, 2]
        wanted[low, 2] = 0.0
        whole = gfsa.Polynomial(filter.num_heads, degree=2).to(wanted)
        whole.set_coefficients(wanted)
        reference.get_submodule(layer).gfsa = whole
        assert pruned.degree == (2 if not low.all() else 1)
    got, expected = first(model(**inputs)), first(reference(**inputs))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 if ZOO[name].single else 1e-12)
    assert report.largest_change is not None
    assert 0 < report.largest_change < 1e-2


@torch.no_grad()
def test_heads_and_layers_skip_their_second_pass() -> None:
    model, inputs = plugged("bert"), ZOO["bert"].batch()
    report = gfsa.prune(model, tolerance=1e-3)
    with mock.patch.object(F, "scaled_dot_product_attention", HeadPasses()) as passes:
        model(**inputs)
    # of 2 layers × 4 heads × 2 passes, two heads of one layer keep their second
    assert passes.count == report.passes_after == 10
    assert report.passes_before == 16
    assert list(report.after.values()) == [[1, 2, 2, 1], [1, 1, 1, 1]]
    assert "head passes 16 → 10 (38% saved)" in str(report)
    assert "2 of 4 heads keep degree 2" in str(report)
    assert "degree 1" in str(report)


def test_heads_are_taken_apart_where_that_pays() -> None:
    from torch._subclasses import FakeTensorMode

    def taken_apart(q: torch.Tensor, heads: int) -> bool:
        return AttentionOperator(q, q).second_pass(range(heads)) is not None

    with FakeTensorMode():
        small, large = (torch.empty(8, 12, n, 64, device="cuda") for n in (128, 8192))
        assert taken_apart(torch.empty(8, 12, 128, 64), heads=11)
        assert not taken_apart(small, heads=2)
        assert taken_apart(large, heads=2)
        assert not taken_apart(large, heads=12)


@torch.no_grad()
def test_what_was_never_trained_is_unplugged() -> None:
    model, inputs = ZOO["bert"].model("sdpa"), ZOO["bert"].batch()
    before = first(model(**inputs))
    gfsa.plug(model)
    report = gfsa.prune(model, tolerance=0.0, inputs=inputs)
    assert report.largest_change == 0.0
    assert not gfsa.filters_of(model)
    assert not [key for key in model.state_dict() if "gfsa" in key]
    assert torch.equal(first(model(**inputs)), before)
    assert list(report.after.values()) == [[1] * 4] * 2
    assert "unplugged: ordinary attention" in str(report)


@torch.no_grad()
def test_undo() -> None:
    model, inputs = plugged("gpt2"), ZOO["gpt2"].batch()
    trained(model, {0: [1], 1: [0, 1, 2, 3]})
    before, keys = first(model(**inputs)), list(model.state_dict())
    for tolerance in (1e-3, 10.0):
        report = gfsa.prune(model, tolerance)
        assert not torch.equal(first(model(**inputs)), before)
        report.undo()
        assert torch.equal(first(model(**inputs)), before)
        assert list(model.state_dict()) == keys


def test_undo_keeps_what_came_later_and_follows_a_moved_model() -> None:
    model = plugged("gpt2")
    trained(model, {0: [1], 1: [0, 1, 2, 3]})
    report = gfsa.prune(model, 1e-3)
    model.double()
    report.undo()
    assert all(f.theta.dtype == torch.float64 for f in gfsa.filters_of(model).values())
    report = gfsa.prune(model, 1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first(model(**ZOO["gpt2"].batch())).sum().backward()
    optimizer.step()
    for change in (lambda: None, lambda: gfsa.unplug(model), lambda: gfsa.plug(model, K=5)):
        change()
        before = gfsa.filters_of(model)
        with pytest.raises(ValueError, match="changed since"):
            report.undo()
        assert gfsa.filters_of(model) == before


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Path) -> None:
    model, inputs = plugged("gpt2"), ZOO["gpt2"].batch()
    trained(model, {0: [0, 3], 1: []})
    gfsa.prune(model, 1e-3)
    expected = first(model(**inputs))
    gfsa.save(model, tmp_path / "filters")
    other = ZOO["gpt2"].model("sdpa")
    gfsa.load(other, tmp_path / "filters")
    assert torch.equal(first(other(**inputs)), expected)
    kinds = [type(filter) for filter in gfsa.filters_of(other).values()]
    assert kinds == [PartialPolynomial, gfsa.Polynomial]

    model.save_pretrained(tmp_path / "model")
    whole = gfsa.from_pretrained(
        transformers.AutoModelForCausalLM, tmp_path / "model", dtype=torch.float64
    )
    assert torch.equal(first(whole.eval()(**inputs)), expected)
    assert torch.equal(first(copy.deepcopy(model)(**inputs)), expected)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
@torch.no_grad()
def test_decoding_keeps_the_powers_of_high_heads_alone(name: str, cache: str | None) -> None:
    model = plugged(name).float()
    gfsa.prune(model, 1e-3)
    ids = ZOO[name].inputs()["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    without = model.generate(ids, use_cache=False, **options)
    found = model.generate(
        ids,
        cache_implementation=cache,
        disable_compile=True,
        return_dict_in_generate=True,
        **options,
    )
    assert torch.equal(found.sequences, without)
    companions = [getattr(layer, "gfsa_powers", {}) for layer in found.past_key_values.layers]
    assert [len(powers.get(at, [])) for at, powers in enumerate(companions)] == [1, 0]
    assert companions[0][0][0].keys.shape[1] == len(HIGH[0])


@torch.no_grad()
def test_an_operator_that_cannot_be_split_does_every_pass() -> None:
    partial = PartialPolynomial(4, degree=2, high=[1])
    partial.theta.normal_()
    matrix, v = torch.randn(2, 4, 7, 7).softmax(-1), torch.randn(2, 4, 7, 5)
    whole = FunctionOperator(lambda x: matrix @ x)
    torch.testing.assert_close(partial(whole, v), partial(DenseOperator(matrix), v))


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf"), "0.1", None])
def test_a_tolerance_that_is_none(tolerance: Any) -> None:
    with pytest.raises(ValueError, match="tolerance must be a finite number"):
        gfsa.prune(plugged("bert"), tolerance)


def test_nothing_to_prune() -> None:
    with pytest.raises(ValueError, match="has no filters to prune"):
        gfsa.prune(ZOO["bert"].model("sdpa"))
