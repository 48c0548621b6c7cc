"""What a filter adds to a layer of a whole model on the host: time, Python calls, launches.

Models of twelve narrow layers, so that what is measured is the host's part: a training step of
BERT with nothing launched by the fused kernels, and one decoded token of GPT-2 with a filled cache.
Each is measured against the same model without filters, in the same process.

Time in a loop is too low: every cache is warm there. The number of calls does not depend on that;
read it for the training step, whose time varies by some 40 µs a layer from run to run.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gfsa.plugs import plug
from gfsa_benchmarks import host

LAYERS = 12
TOKENS = 16
REPEATS = 60
ROUNDS = 15

Work = Callable[[], object]


@dataclass(frozen=True)
class Cost:
    """What one piece of work costs the host, or what a layer adds to it."""

    microseconds: float
    calls: float
    """Python functions and C functions called from Python."""
    operators: float | None = None
    """Operators of torch that compute something: each is a launch on a GPU, at least."""

    def added_to(self, plain: Cost) -> Cost:
        """What a layer of this adds to a layer of ``plain``."""
        operators = None
        if self.operators is not None and plain.operators is not None:
            operators = (self.operators - plain.operators) / LAYERS
        return Cost(
            (self.microseconds - plain.microseconds) / LAYERS,
            (self.calls - plain.calls) / LAYERS,
            operators,
        )

    def __str__(self) -> str:
        seen = "" if self.operators is None else f", {self.operators:.0f} operators of torch"
        return f"{self.microseconds:.0f} µs, {self.calls:.0f} calls{seen}"


def measure(works: dict[str, Work], operators: bool) -> dict[str, Cost]:
    """What each of ``works`` costs; they take turns, so that a slow minute affects all of them.

    Args:
        operators: whether to count torch's operators as well; fused kernels take another path where
            a dispatch mode counts.
    """
    least = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for name, work in works.items():
            least[name] = min(least[name], host.microseconds_of(work, REPEATS))
    return {
        name: Cost(least[name], count_calls(work), count_operators(work) if operators else None)
        for name, work in works.items()
    }


def count_calls(work: Work) -> int:
    """How many functions ``work`` calls, in Python and from it."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def count_operators(work: Work) -> int:
    """How many of torch's operators compute something while ``work`` runs; views do not."""
    counter = _Counter()
    with counter:
        work()
    return counter.operators


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operators += not (func.is_view or func._schema.name in _COMPUTE_NOTHING)
        return func(*args, **(kwargs or {}))


_COMPUTE_NOTHING = (
    "aten::_unsafe_view",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
)


def variants(plain: Any) -> dict[str, Any]:
    """The model without filters, and plugged with those of degrees one and two."""
    models = {"plain": plain}
    for name, K in (("degree 1", None), ("degree 2", 3)):
        models[name] = copy.deepcopy(plain)
        plug(models[name], K=K)
    return models


def training() -> dict[str, Cost]:
    """A training step of BERT: forward and backward under autocast, no dropout."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = torch.ones(1, TOKENS, dtype=torch.long)

    def step(model: Any) -> Work:
        parameters = list(model.parameters())

        def work() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                out = model(ids).last_hidden_state
            torch.autograd.grad(out.sum(), parameters, allow_unused=True)

        return work

    models = variants(BertModel(config, add_pooling_layer=False).train())
    return measure({name: step(model) for name, model in models.items()}, operators=False)


def decoding(static: bool) -> dict[str, Cost]:
    """One token of GPT-2 with a filled cache."""
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, StaticCache

    config = GPT2Config(
        vocab_size=8,
        n_embd=16,
        n_layer=LAYERS,
        n_head=2,
        n_positions=2 * TOKENS,
        n_inner=8,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = torch.ones(1, TOKENS, dtype=torch.long)

    def step(model: Any) -> Work:
        cache: Any = (
            StaticCache(config=config, max_cache_len=2 * TOKENS)
            if static
            else DynamicCache(config=config)
        )
        position = torch.full((1, 1), TOKENS)
        with torch.no_grad():
            model(ids, past_key_values=cache)

        def work() -> None:
            with torch.no_grad():
                model(ids[:, :1], past_key_values=cache, position_ids=position)
            rewind(cache, static)

        return work

    # in float32: a CPU makes copies to add numbers of two dtypes, which a GPU does not
    models = variants(GPT2LMHeadModel(config).eval())
    return measure({name: step(model) for name, model in models.items()}, operators=True)


def rewind(cache: Any, static: bool) -> None:
    """Take the newest token out again, so that every token is decoded at the same length."""
    if not static:
        cache.crop(-1)
        return
    for layer in cache.layers:
        companions = getattr(layer, "gfsa_powers", {}).values()
        for each in (layer, *itertools.chain(*companions)):
            each.cumulative_length.fill_(TOKENS)


def main() -> None:
    with host.nothing_launched():
        report("BERT, training step", training())
    report("GPT-2, one token, dynamic cache", decoding(static=False))
    report("GPT-2, one token, static cache", decoding(static=True))


def report(name: str, costs: dict[str, Cost]) -> None:
    plain = costs.pop("plain")
    print(f"{name}: a layer takes {plain.microseconds / LAYERS:.0f} µs")
    for variant, cost in costs.items():
        print(f"  {variant} adds {cost.added_to(plain)}")
