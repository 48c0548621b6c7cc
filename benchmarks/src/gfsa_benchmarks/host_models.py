"""The host cost that a filter adds per layer of a whole model: time, Python calls, launches.

The models have twelve narrow layers, so that the host dominates: a training step of BERT in which
the fused kernels launch nothing, and one decoded token of GPT-2 and of Llama with a filled cache,
by torch's calls and by the kernel for a token. Each is compared with the same model without
filters, in the same process.

Times in a loop are optimistic because all caches are warm. The number of calls does not depend on
that; it is the figure to read for the training step, whose time varies by about 40 µs per layer
between runs.
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
from gfsa_benchmarks import host_calls

LAYERS = 12
TOKENS = 16
REPEATS = 60
ROUNDS = 15

Work = Callable[[], object]


@dataclass(frozen=True)
class Cost:
    """The host cost of a call, or the part that a layer adds."""

    microseconds: float
    calls: float
    """Python functions and C functions called from Python."""
    operators: float | None = None
    """Operators of torch that compute something: each is at least one launch on a GPU."""

    def added_to(self, plain: Cost) -> Cost:
        """The cost per layer beyond that of ``plain``."""
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
    """The cost of each of ``works``, in interleaved rounds.

    Args:
        operators: whether to count torch's operators too; while a dispatch mode counts, the fused
            kernels take another path.
    """
    least = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for name, work in works.items():
            least[name] = min(least[name], host_calls.microseconds_of(work, REPEATS))
    return {
        name: Cost(least[name], count_calls(work), count_operators(work) if operators else None)
        for name, work in works.items()
    }


def count_calls(work: Work) -> int:
    """The number of Python and C functions that ``work`` calls."""
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
    """The number of torch operators that ``work`` runs, without views."""
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
    """The model without filters, and with filters of degree 1 and 2."""
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


def decoding(static: bool, kind: str = "gpt2") -> dict[str, Cost]:
    """One token of GPT-2 or Llama with a filled cache.

    A filter of degree 2 is two calls of torch's attention, or in
    :func:`~gfsa_benchmarks.host_calls.nothing_launched` one launch of the kernel for a token.
    """
    from transformers import DynamicCache, StaticCache

    ids = torch.ones(1, TOKENS, dtype=torch.long)
    plain = _decoder(kind)

    def step(model: Any) -> Work:
        cache: Any = (
            StaticCache(config=plain.config, max_cache_len=2 * TOKENS)
            if static
            else DynamicCache(config=plain.config)
        )
        position = torch.full((1, 1), TOKENS)
        with torch.no_grad():
            model(ids, past_key_values=cache)

        def work() -> None:
            with torch.no_grad():
                model(ids[:, :1], past_key_values=cache, position_ids=position)
            rewind(cache, static)

        return work

    # in float32: to add numbers of two dtypes a CPU makes copies, unlike a GPU
    models = variants(plain)
    return measure({name: step(model) for name, model in models.items()}, operators=True)


def _decoder(kind: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=8,
                n_embd=16,
                n_layer=LAYERS,
                n_head=2,
                n_positions=2 * TOKENS,
                n_inner=8,
                bos_token_id=0,
                eos_token_id=0,
            )
        ).eval()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=16,
            intermediate_size=8,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2 * TOKENS,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).eval()


def rewind(cache: Any, static: bool) -> None:
    """Remove the newest token, so that every token is decoded at the same length."""
    if not static:
        cache.crop(-1)
        return
    for layer in cache.layers:
        layer.cumulative_length.fill_(TOKENS)


def main() -> None:
    with host_calls.nothing_launched():
        report("BERT, training step", training())
    for kind, static in itertools.product(("gpt2", "llama"), (False, True)):
        name = f"{kind}, one token, {'static' if static else 'dynamic'} cache"
        report(f"{name}, by torch", decoding(static, kind))
        with host_calls.nothing_launched():
            report(f"{name}, by the kernel", decoding(static, kind))


def report(name: str, costs: dict[str, Cost]) -> None:
    plain = costs.pop("plain")
    print(f"{name}: a layer takes {plain.microseconds / LAYERS:.0f} µs")
    for variant, cost in costs.items():
        print(f"  {variant} adds {cost.added_to(plain)}")
