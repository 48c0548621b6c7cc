"""A compiled token, and the static cache that it reads: what changes later is seen."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import gfsa
from gfsa.adapters.transformers.cache import StaticPowers, TracedStaticPowers

transformers.logging.set_verbosity_error()

HEADS, HELD, ROWS = 4, 5, 16


def model(layers: int, degree: int) -> Any:
    """A GPT-2 with filters of a degree, or without any (0)."""
    config = transformers.GPT2Config(
        vocab_size=32,
        n_embd=8 * HEADS,
        n_layer=layers,
        n_head=HEADS,
        n_positions=ROWS,
        bos_token_id=None,
        eos_token_id=None,
    )
    made = transformers.GPT2LMHeadModel(config).eval()
    if degree:
        gfsa.plug(made, K=3 if degree == 2 else None, w0=0.1, w1=0.8)
    return made


def filled(made: Any) -> Any:
    cache = transformers.StaticCache(config=made.config, max_cache_len=ROWS)
    ids = torch.randint(32, (1, HELD), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        made(ids, past_key_values=cache)
    return cache


class Compiled:
    """A compiled step that decodes the same token again and again, and what was compiled."""

    def __init__(self, made: Any, cache: Any) -> None:
        torch.compiler.reset()
        self.model, self.cache = made, cache
        self.inputs: list[int] = []
        self.step = torch.compile(made.forward, backend=self.backend, fullgraph=True)

    def backend(self, graph: Any, inputs: list[Any]) -> Any:
        self.inputs.append(len(inputs))
        return graph.forward

    def token(self) -> Tensor:
        token, position = torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), HELD)
        with torch.no_grad():
            logits: Tensor = self.step(
                token, past_key_values=self.cache, position_ids=position
            ).logits
        for layer in self.cache.layers:
            layer.cumulative_length.sub_(1)
        return logits


def own_powers(layer: Any) -> Any:
    return getattr(layer, "gfsa_powers", {}).values()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch.compiler.reset()


def test_a_compiled_token_sees_what_changes() -> None:
    made = model(2, 2)
    cache = filled(made)
    compiled = Compiled(made, cache)
    tokens = [compiled.token()]
    wanted = []
    for change in ("theta", "base", "basis", "another base"):
        with torch.no_grad():
            for filter in gfsa.filters_of(made).values():
                if change == "another base":
                    filter.base = filter.base + 0.5
                else:
                    getattr(filter, change).add_(0.5)
        tokens.append(compiled.token())
        assert len(compiled.inputs) == 1, f"{change}: nothing has to be compiled again"
        step, compiled.step = compiled.step, made.forward
        wanted.append(compiled.token())
        compiled.step = step
    for before, after, exact in zip(tokens, tokens[1:], wanted, strict=False):
        assert (before - after).abs().max() > 1e-3
        torch.testing.assert_close(after, exact)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_static_cache_counts_for_itself(how: str) -> None:
    made = model(2, 2)
    cache = filled(made)
    other = copy.deepcopy(cache) if how == "deepcopy" else pickle.loads(pickle.dumps(cache))
    for layer, copied in zip(cache.layers, other.layers, strict=True):
        assert copied.update.layer is copied is not layer
        (((powers,),), ((own,),)) = own_powers(copied), own_powers(layer)
        assert type(powers) is StaticPowers
        assert powers is not own
        assert torch.equal(powers.keys, own.keys)
    token = torch.tensor([[3]])
    with torch.no_grad():
        first, second = (made(token, past_key_values=held).logits for held in (cache, other))
    assert torch.equal(first, second)


def test_a_cache_that_a_compiled_prompt_has_filled() -> None:
    """A graph cannot make modules: such powers are checked one by one, and are the same."""
    made = model(2, 2)
    prompt = torch.randint(32, (1, HELD), generator=torch.Generator().manual_seed(1))
    cache = transformers.StaticCache(config=made.config, max_cache_len=ROWS)
    token = torch.tensor([[3]])
    step = torch.compile(made, backend="eager")
    with torch.no_grad():
        step(prompt, past_key_values=cache)
        got = step(token, past_key_values=cache).logits
        wanted = made(torch.cat([prompt, token], 1), use_cache=False).logits[:, -1:]
    kinds = {type(c) for layer in cache.layers for some in own_powers(layer) for c in some}
    assert kinds == {TracedStaticPowers}
    torch.testing.assert_close(got, wanted)


def test_powers_of_a_static_layer_are_no_part_of_a_model() -> None:
    made = model(2, 2)
    modules = set(made.modules())
    for layer in filled(made).layers:
        (((powers,),),) = (own_powers(layer),)
        assert isinstance(powers, nn.Module)
        assert powers not in modules
        assert not powers.state_dict()
