"""Continuous batching of plugged models: filters of degree 1 as in ``generate``, others refused.

More models and implementations are in ``tests/engines/test_transformers.py``.
"""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import flash_paged

import gfsa
from support.batching import SECTORS, by_batching, by_generate, decoder, greedy, prompts

hf.logging.set_verbosity_error()
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

LENGTHS = (5, 11, 17)
MIXED = "gemma 3, both kinds of layers"
GROUPED = "llama, grouped queries"


def settings() -> Any:
    return hf.ContinuousBatchingConfig(num_blocks=80, block_size=4, max_batch_tokens=64)


@pytest.mark.parametrize("name", [GROUPED, MIXED])
def test_the_tokens_are_those_of_generate(name: str) -> None:
    model = decoder(name)
    inputs = prompts(*LENGTHS)
    expected = by_generate(model, inputs, new=20)
    # 8 tokens a batch: prompts come in pieces, beside requests that decode already
    for most in (64, 8):
        assert by_batching(model, inputs, new=20, max_batch_tokens=most) == expected
    assert model.config._attn_implementation == "sdpa"
    gfsa.unplug(model)
    # the filters change the tokens, so that a filter that is left out would be seen
    assert by_generate(model, inputs[:1], new=20) != expected[:1]


@pytest.mark.parametrize("name", [GROUPED, MIXED])
def test_the_exclusive_and_the_depth_term(name: str) -> None:
    def filter(heads: int) -> gfsa.GraphFilter:
        return gfsa.GFSA(heads, K=None).exclude(0.5, learn=True)

    model = decoder(name, filter=filter, depth=True)
    asked = prompts(*LENGTHS)
    assert by_batching(model, asked, 12) == by_generate(model, asked, 12)


def test_a_filter_of_degree_2_is_refused_before_anything_starts() -> None:
    model = decoder(GROUPED, filter=gfsa.GFSA)
    expected = r"layers.0.self_attn .*degree 2, and .*generate\(\), or vLLM .*K=None"
    for start in (lambda: model.generate_batch([[5, 6]]), model.init_continuous_batching):
        with pytest.raises(NotImplementedError, match=expected):
            start()
    # what goes around the model's own entry has the reason in its result
    manager = type(model).init_continuous_batching(model, greedy(), settings())
    manager.start()
    manager.add_request([5, 6, 7], eos_token_id=-1)
    error = manager.get_result(timeout=30).error
    manager.stop()
    assert "not the powers A·v of past tokens" in error


def test_a_model_plugged_by_tracing_is_refused() -> None:
    config = hf.GPTNeoConfig(
        vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
    )
    model = hf.GPTNeoForCausalLM(config)
    gfsa.plug(model, K=None)
    with pytest.raises(NotImplementedError, match=r"is plugged by tracing.*Use generate\(\)"):
        model.generate_batch([[5, 6]])


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, *_: Any, **options: Any
) -> Tensor:
    """What flash's kernel for sequences end to end computes, written out."""
    assert q.shape[1] % k.shape[1] == 0
    assert k.shape == v.shape
    window, out = options["window_size"][0], []
    for i in range(len(q_ends) - 1):
        a, b = (
            x[start:end].transpose(0, 1)
            for x, start, end in ((q, q_ends[i], q_ends[i + 1]), (k, k_ends[i], k_ends[i + 1]))
        )
        value = v[k_ends[i] : k_ends[i + 1]].transpose(0, 1)
        rows = torch.arange(a.shape[1])[:, None] + b.shape[1] - a.shape[1]
        columns = torch.arange(b.shape[1])
        seen = columns <= rows
        if window >= 0:
            seen &= columns >= rows - window
        out.append(
            F.scaled_dot_product_attention(
                a, b, value, attn_mask=seen, scale=options["softmax_scale"], enable_gqa=True
            )
        )
    return torch.cat(out, dim=1).transpose(0, 1)


def by_keywords(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The same kernel, with the arguments that transformers looks for in its signature."""
    assert causal
    return varlen_attention(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k), softmax_scale=softmax_scale, window_size=window_size
    )


@pytest.mark.parametrize("name", [MIXED, pytest.param(GROUPED, marks=pytest.mark.slow)])
def test_flash_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(name)
    inputs = prompts(*LENGTHS)
    expected = by_generate(model, inputs, new=12)
    if SECTORS:
        monkeypatch.setattr(flash, "_loaded_implementation", None)
        monkeypatch.setattr(
            flash, "_lazy_imports", lambda *_, **__: (None, by_keywords, None, None, None)
        )
        model.config._attn_implementation_internal = "flash_attention_2"
    else:
        monkeypatch.setattr(
            flash_paged, "lazy_import_paged_flash_attention", lambda name: (varlen_attention, None)
        )
        model.config._attn_implementation_internal = "paged|flash_attention_2"
    assert by_batching(model, inputs, new=12, max_batch_tokens=16) == expected


def test_copies_start_themselves_and_unplugged_models_are_as_before() -> None:
    model = decoder(GROUPED)
    inputs = prompts(4)
    expected = by_generate(model, inputs, new=5)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.init_continuous_batching.args == (copied,)
        assert by_batching(copied, inputs, new=5) == expected
    gfsa.unplug(model)
    assert "init_continuous_batching" not in model.__dict__
    assert model.init_continuous_batching.__func__ is type(model).init_continuous_batching


def test_a_kept_manager_does_not_survive_other_filters(tmp_path: Path) -> None:
    model = decoder(GROUPED)
    inputs = prompts(9)
    gfsa.save(model, tmp_path)
    arguments = {"generation_config": greedy(5), "continuous_batching_config": settings()}
    for _ in range(2):
        (result,) = model.generate_batch(inputs, persistent_manager=True, **arguments).values()
        assert result.generated_tokens == by_generate(model, inputs, new=5)[0]
    gfsa.load(model, tmp_path)
    assert "_cached_continuous_batching_manager" not in model.__dict__
