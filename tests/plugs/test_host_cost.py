"""What a filter costs the host: Python calls and torch's operators per layer, with no GPU.

Times vary with the machine; the numbers of calls and operators do not. On a GPU every operator is
at least one launch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import gfsa
from gfsa.operators import AttentionOperator
from support.nothing_launched import nothing_launched

LAYERS = 12
TOKENS = 16
Work = Callable[[], object]

_COMPUTE_NOTHING = (
    "aten::_unsafe_view",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
)


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


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += not (func.is_view or func._schema.name in _COMPUTE_NOTHING)
        return func(*args, **(kwargs or {}))


def count_operators(work: Work) -> int:
    """The number of torch operators that ``work`` runs, without views."""
    with Counter() as counter:
        work()
    return counter.operators


def added(steps: list[Work], count: Callable[[Work], int]) -> list[float]:
    """What each layer adds with filters of degree 1 and 2 to the model without filters."""
    for _ in range(3):
        # fills the caches of decisions and prepared launches
        for step in steps:
            step()
    plain, *filtered = map(count, steps)
    return [(counted - plain) / LAYERS for counted in filtered]


def variants(plain: Any) -> list[Any]:
    """The model without filters, and with filters of degree 1 and 2."""
    models = [plain]
    for K in (None, 3):
        models.append(copy.deepcopy(plain))
        gfsa.plug(models[-1], K=K)
    return models


def training_step(model: Any) -> Work:
    ids = torch.ones(1, TOKENS, dtype=torch.long)
    parameters = list(model.parameters())

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids).last_hidden_state
        torch.autograd.grad(out.sum(), parameters, allow_unused=True)

    return work


def decoding_step(model: Any, static: bool) -> Work:
    """One token with a filled cache; the token is removed again."""
    from transformers import DynamicCache, StaticCache

    ids = torch.ones(1, TOKENS, dtype=torch.long)
    cache: Any = (
        StaticCache(config=model.config, max_cache_len=2 * TOKENS)
        if static
        else DynamicCache(config=model.config)
    )
    position = torch.full((1, 1), TOKENS)
    with torch.no_grad():
        model(ids, past_key_values=cache)

    def work() -> None:
        with torch.no_grad():
            model(ids[:, :1], past_key_values=cache, position_ids=position)
        if not static:
            cache.crop(-1)
        else:
            for layer in cache.layers:
                layer.cumulative_length.fill_(TOKENS)

    return work


def decoder(kind: str) -> Any:
    import transformers as hf

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": LAYERS, "n_head": 2, "n_positions": 2 * TOKENS}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=8, n_inner=8, **sizes, **ends)).eval()
    config = hf.LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2 * TOKENS,
        **ends,
    )
    return hf.LlamaForCausalLM(config).eval()


def test_a_training_step_takes_few_calls() -> None:
    hf = pytest.importorskip("transformers")
    config = hf.BertConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    models = variants(hf.BertModel(config, add_pooling_layer=False).train())
    with nothing_launched():
        calls = added([training_step(model) for model in models], count_calls)
    assert all(0 < each < 300 for each in calls)


@pytest.mark.parametrize(("tokens", "is_causal"), [(128, False), (256, False), (1024, True)])
@pytest.mark.parametrize("kind", ["degree 1", "exclusive"])
def test_a_cheap_filter_takes_no_more_calls_than_degree_two(
    kind: str, tokens: int, is_causal: bool
) -> None:
    """Than degree 2 on short sequences, whose gradient is one launch where theirs are two."""

    def calls(layer: Any, tokens: int, is_causal: bool) -> int:
        q = torch.zeros(1, 2, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
        inputs, g = [q, *layer.parameters()], torch.zeros_like(q)

        def step() -> None:
            y = layer(AttentionOperator(q, q, is_causal=is_causal), q)
            torch.autograd.grad(y, inputs, g)

        for _ in range(3):
            step()
        # a tensor where none was before takes a call more
        return min(count_calls(step) for _ in range(5))

    cheap = gfsa.GFSA(2, K=None) if kind == "degree 1" else gfsa.Exclusive(2)
    with nothing_launched():
        assert calls(cheap, tokens, is_causal) <= 1.1 * calls(gfsa.GFSA(2, K=3), 128, False)


def test_a_decoded_token_takes_few_launches() -> None:
    pytest.importorskip("transformers")
    steps = [decoding_step(model, static=False) for model in variants(decoder("gpt2"))]
    # degree 1: the coefficients, a product, and a sum that is rounded as well. Degree 2: two more
    # for the coefficients, the power kept, the second pass, and another sum
    assert added(steps, count_operators) == [3, 8]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("static", [False, True])
def test_a_token_by_the_kernel_is_one_launch(kind: str, static: bool) -> None:
    """In place of torch's attention; the cache of powers and the coefficients need no other.

    A filter of degree 1, which has no powers, takes fewer calls.
    """
    pytest.importorskip("transformers")
    with nothing_launched():
        steps = [decoding_step(model, static) for model in variants(decoder(kind))]
        calls = added(steps, count_calls)
        # attention with a mask, that of free rows, is three operators more on a CPU
        assert added(steps, count_operators) == [-3 if static else 0] * 2
    assert calls[0] < 107
    # some of them see that the caller assigned other rows to the cache
    assert calls[1] < 135
