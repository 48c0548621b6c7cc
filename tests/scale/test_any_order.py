"""plug, forward, save, load, unplug, copies, .to, compile and wrap, in any order.

Hypothesis runs sequences of them on small models. After every step the model is plugged and
computes ``Σ c_k·A^k·v``, by a dense formula in the tests, or it is as it was before it was plugged.
"""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn

import gfsa
from gfsa.filters import PartialPolynomial
from gfsa.plugs import sites
from support.plugging import filtered_softmax, slow_path
from support.tiny import TinyEncoder
from support.written_attention import DIM, HEADS, written

LENGTHY = int(os.environ.get("GFSA_FUZZ", "0")) > 1000


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, DIM, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def traced() -> nn.Module:
    return nn.Sequential(written("matmul"), nn.LayerNorm(DIM), written("matmul"))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": DIM, "intermediate_size": DIM, "num_attention_heads": HEADS}
    config = BertConfig(**sizes, num_hidden_layers=2, vocab_size=3, max_position_embeddings=8)
    return Embedded(BertModel(config, add_pooling_layer=False))


class Container(nn.Module):
    """A model of which the first one is a part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class Embedded(Container):
    """A model of transformers, tokens in and out."""

    def forward(self, x: Tensor) -> Tensor:
        return self.module(inputs_embeds=x)[0]


FILTERS: dict[str, Callable[[int], gfsa.GraphFilter]] = {
    "gfsa": gfsa.GFSA,
    "K=5": lambda heads: gfsa.GFSA(heads, K=5, learn=("wK",), w0=0.1, lr_multiplier=3.0),
    "exact": lambda heads: gfsa.GFSA(heads, K=3, power="exact", w0=[0.1, -0.2, 0.3, 0.0]),
    "degree 1": lambda heads: gfsa.GFSA(heads, K=None, w0=0.3),
    "polynomial": lambda heads: gfsa.Polynomial(heads, degree=3),
    "twicing": gfsa.Twicing,
    "pruned": lambda heads: PartialPolynomial(heads, 2, [1]),
}


@dataclass(frozen=True)
class Fact:
    """What a filter is."""

    settings: tuple[str, str]
    """Its kind and its arguments."""
    dropout_after: str
    coefficients: Tensor


@dataclass(frozen=True)
class Saved:
    """A folder, and the filters that were saved into it."""

    folder: Path
    filters: dict[str, Fact]


def facts_of(model: nn.Module) -> dict[str, Fact]:
    """Every filter of a model, under names without the prefixes of wrappers."""
    return {
        short(name): Fact(
            (filter.describe()["kind"], repr(filter.config())),
            filter.dropout_after,
            filter.coefficients().detach().double().clone(),
        )
        for name, filter in gfsa.filters_of(model).items()
    }


def equal_facts(found: dict[str, Fact], expected: dict[str, Fact]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].settings == expected[name].settings
        and found[name].dropout_after == expected[name].dropout_after
        # the precision of the model may have changed in between
        and torch.allclose(
            found[name].coefficients, expected[name].coefficients, rtol=1e-5, atol=1e-6
        )
        for name in found
    )


def layer_names(model: nn.Module) -> list[str]:
    """The names of all layers that can have a filter, without the prefixes of wrappers."""
    found = sites(model, unknown="trace")
    return [short(name) for name, site in found.items() if site.refusal is None]


def short(name: str) -> str:
    return name.replace("module.", "").replace("_orig_mod.", "")


kinds = st.sampled_from(sorted(FILTERS))
choices = st.sampled_from(["all", "odd", "even"])


class AnyOrder(RuleBasedStateMachine):
    """The model, the filters that it should have, and a twin that is never plugged."""

    build: Callable[[], nn.Module]

    saves = Bundle("saves")

    @initialize(seed=st.integers(0, 3), kind=st.none() | kinds)
    def start(self, seed: int, kind: str | None) -> None:
        torch.manual_seed(seed)
        self.inner = type(self).build().eval()
        self.model = self.inner
        self.plain = copy.deepcopy(self.inner)
        self.expected: dict[str, Fact] = {}
        self.x = torch.randn(2, 4, DIM)
        self.folder = Path(tempfile.mkdtemp(prefix="gfsa-any-order-"))
        self.steps = 0
        self.may_compile = seed == 0
        if kind is not None:
            gfsa.plug(self.model, filter=FILTERS[kind], unknown="trace")
            self.expected = facts_of(self.model)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    # what changes filters

    @rule(kind=kinds, layers=choices, dropout=st.sampled_from(["attention", "filter"]))
    @precondition(lambda self: len(self.expected) < 2)
    def plug(self, kind: str, layers: str, dropout: str) -> None:
        plugged = set(self.expected)
        names = layer_names(self.model)
        start, step = {"all": (0, 1), "odd": (0, 2), "even": (1, 2)}[layers]
        selected = set(names[start::step])
        self._attempt(
            lambda: gfsa.plug(
                self.model,
                filter=FILTERS[kind],
                layers=layers,
                dropout_after=dropout,
                unknown="trace",
            ),
            # a layer that is plugged already is refused, and with it the others
            allowed=not plugged & selected,
            done=lambda found: found.keys() == plugged | selected,
        )

    @rule()
    @precondition(lambda self: self.expected)
    def plug_twice(self) -> None:
        self.plug("gfsa", "all", "attention")

    @rule()
    @precondition(lambda self: self.expected)
    def unplug(self) -> None:
        self._attempt(lambda: gfsa.unplug(self.model), allowed=True, done=lambda found: not found)

    @rule(target=saves)
    @precondition(lambda self: self.expected)
    def save(self) -> Saved:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        gfsa.save(self.model, folder)
        return Saved(folder, dict(self.expected))

    @rule(saved=saves)
    def load(self, saved: Saved) -> None:
        fits = self.expected.keys() == saved.filters.keys() and all(
            self.expected[name].settings == saved.filters[name].settings for name in saved.filters
        )
        self._attempt(
            lambda: gfsa.load(self.model, saved.folder),
            allowed=fits or not self.expected,
            done=lambda found: equal_facts(found, saved.filters),
        )

    @rule(seed=st.integers(0, 9))
    @precondition(lambda self: self.expected)
    def train(self, seed: int) -> None:
        """What an optimiser does to the filters, without one."""
        generator = torch.Generator().manual_seed(seed)
        for filter in gfsa.filters_of(self.model).values():
            if filter.theta is not None:
                step = 0.2 * torch.randn(filter.theta.shape, generator=generator)
                with torch.no_grad():
                    filter.theta.copy_(step)
        self.expected = facts_of(self.model)

    def _attempt(
        self, action: Callable[[], Any], allowed: bool, done: Callable[[dict[str, Fact]], bool]
    ) -> None:
        """Done, or refused and everything as it was."""
        try:
            action()
        except ValueError:
            assert not allowed
            assert equal_facts(facts_of(self.model), self.expected)
            return
        assert allowed
        self.expected = facts_of(self.model)
        assert done(self.expected)

    # what leaves filters alone

    @rule()
    def deepcopy(self) -> None:
        self.inner = self.model = copy.deepcopy(self.inner)

    @rule()
    def pickle(self) -> None:
        self.inner = self.model = pickle.loads(pickle.dumps(self.inner))

    @rule(dtype=st.sampled_from([torch.float32, torch.float64]))
    def to(self, dtype: torch.dtype) -> None:
        self.model.to(dtype)
        self.plain.to(dtype)
        self.x = self.x.to(dtype)

    @rule()
    @precondition(lambda self: self.model is self.inner)
    def wrap(self) -> None:
        self.model = Container(self.inner)

    @rule()
    @precondition(lambda self: self.may_compile and self.model is self.inner)
    def compile(self) -> None:
        # compiling takes longer than all other steps together: once in some of the sequences
        self.may_compile = False
        torch._dynamo.reset()
        self.model = torch.compile(self.inner, backend="eager")

    @rule()
    @precondition(lambda self: self.model is not self.inner)
    def unwrap(self) -> None:
        self.model = self.inner

    @rule()
    def forward_that_raises(self) -> None:
        # the model's own error, or one of torch's
        with pytest.raises((RuntimeError, ValueError, AssertionError)):
            self.model(torch.zeros(1, 2, DIM + 1, dtype=self.x.dtype))

    # what must hold after every step

    @invariant()
    def plugged_and_right_or_as_it_was(self) -> None:
        if not hasattr(self, "model"):
            return
        assert equal_facts(facts_of(self.model), self.expected)
        state = {name: t for name, t in self.inner.state_dict().items() if ".gfsa." not in name}
        plain = self.plain.state_dict()
        assert list(state) == list(plain)
        assert all(torch.equal(state[name], plain[name]) for name in plain)
        if not self.expected:
            modules = dict(self.plain.named_modules())
            for name, module in self.inner.named_modules():
                assert type(module) is type(modules[name])
                assert not [key for key in vars(module) if "gfsa" in key]
                assert module._forward_hooks.keys() == modules[name]._forward_hooks.keys()
                assert len(module._forward_pre_hooks) == len(modules[name]._forward_pre_hooks)

        # not after every step: a plugged model that has not run yet is under check
        if self.steps % 2:
            self._forward(self.inner)
        self.steps += 1

    @rule()
    def forward(self) -> None:
        self._forward(self.model)

    def _forward(self, model: nn.Module) -> None:
        with torch.no_grad():
            found, expected = model(self.x), self._by_the_formula()
        scale = max(1.0, float(expected.abs().max()))
        assert (found - expected).abs().max() <= 2e-5 * scale

    def _by_the_formula(self) -> Tensor:
        ordinary = torch.tensor([0.0, 1.0], dtype=self.x.dtype).expand(HEADS, 2)
        coefficients = [
            self.expected[name].coefficients.to(self.x.dtype) if name in self.expected else ordinary
            for name in layer_names(self.plain)
        ]
        with slow_path(), filtered_softmax(self.plain, coefficients):
            return self.plain(self.x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "an adapter of one's own": lambda: TinyEncoder(depth=2),
    "torch": torch_encoder,
    "traced": traced,
    "transformers": bert,
}


@pytest.mark.parametrize("name", MODELS)
def test_any_order(name: str) -> None:
    machine = type(name, (AnyOrder,), {"build": staticmethod(MODELS[name])})
    examples, steps = (300, 50) if LENGTHY else (8, 20)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps)
    )
