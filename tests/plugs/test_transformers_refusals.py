"""Attention of transformers that has no square map over its own tokens is refused, never filtered.

By plug where class, signature and settings show it; by the first forward where only the numbers do.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.sam.modeling_sam import SamAttention

import gfsa
from gfsa.plugs.checks.proof import REASON
from gfsa.plugs.registry import OLDEST_TRANSFORMERS
from support.zoo import randomise

hf.logging.set_verbosity_error()

TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


CROSSING = "different tokens"


def ids(length: int = 10) -> Tensor:
    return torch.randint(6, 61, (2, length), generator=torch.Generator().manual_seed(0))


def sam_attention() -> SamAttention:
    torch.manual_seed(0)
    config = hf.SamMaskDecoderConfig(hidden_size=16, num_attention_heads=2)
    config._attn_implementation = "sdpa"
    return SamAttention(config, downsample_rate=1).eval()


@pytest.mark.parametrize(
    ("kind", "plugged", "skipped"),
    [
        # of its backbone, the layers between stages pool their queries
        ("Sam2", 9 + 2, {"query_stride": 3, CROSSING: 5}),
        ("EdgeTamVideo", 9 + 2 + 2 + 2, {"query_stride": 3, CROSSING: 9}),
        ("EfficientLoFTR", 0, {"pooled in different ways": 4, CROSSING: 8}),
        ("MuseGlimmerAssistant", 0, {CROSSING: 5}),
    ],
)
def test_models_too_large_to_run_here(kind: str, plugged: int, skipped: dict[str, int]) -> None:
    with torch.device("meta"):
        model = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")())
    found = gfsa.plugs.sites(model)
    reasons = [site.refusal for site in found.values() if site.refusal is not None]
    assert len(found) - len(reasons) == plugged
    for words, count in skipped.items():
        assert sum(words in reason for reason in reasons) == count


def test_an_older_transformers_is_refused_for_its_own_models_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
    assert f'"transformers>={oldest}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.14.1")
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    assert gfsa.plug(nn.TransformerEncoder(layer, 1)).plugged
    with pytest.raises(ImportError, match=r"5\.15 or newer.*5\.14\.1"):
        gfsa.plug(llama())


def test_queries_and_keys_of_equal_length_must_be_the_same_tokens() -> None:
    layer = sam_attention()
    gfsa.plug(layer)
    randomise(layer)
    x, y = torch.randn(2, 1, 2, 6, 16).unbind()
    layer(x, x, y)
    layer(query=x, key=x.clone(), value=y)
    with pytest.raises(ValueError, match="its key has other values than its query"):
        layer(x, y, y)
    with pytest.raises(ValueError, match="its key has other values than its query"):
        layer(query=x, key=y, value=y)
    gfsa.unplug(layer)
    layer(x, y, y)


def test_the_same_layer_by_the_names_that_models_give_to_cross_attention() -> None:
    names = ("cross_attn_image", "final_attn_token_to_image", "x_attn", "text_cross_attn")
    names += ("vision_cross_attn", "prompt_cross_attn", "encoder_attn_text", "attn2")
    names += ("image_pooling_2d",)
    model = nn.ModuleDict({name: sam_attention() for name in (*names, "attn", "encoder_attns")})
    report = gfsa.plug(model)
    assert report.skipped == dict.fromkeys(names, REASON)


def granite(kind: str = "GraniteSWA", **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(**TEXT, attn_implementation="eager", **options)
    return getattr(hf, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize("kind", ["GraniteSWA", "GraniteMoeSWA"])
def test_weights_that_are_not_what_was_multiplied_are_refused_by_plug(kind: str) -> None:
    model = granite(kind)
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match="returns weights A that are not what it multiplied"):
        gfsa.plug(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    model(ids())


def written_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights before and after their dropout, and their product with the values."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = (q @ k.mT * options["scaling"] + mask).softmax(-1)
    dropped = torch.dropout(weights, options["dropout"], module.training)
    return weights, dropped, (dropped @ v).transpose(1, 2)


@pytest.mark.parametrize("place", ["attention", "filter"])
@pytest.mark.parametrize("training", [False, True])
def test_weights_that_are_not_what_was_multiplied_are_refused_by_a_forward(
    place: Any, training: bool
) -> None:
    """As after a switch of the implementation, or where plug cannot try the function."""

    def scaled(*args: Any, **options: Any) -> Any:
        _, weights, product = written_attention(*args, **options)
        return 0.9 * product, weights

    model = llama(attention_dropout=0.2)
    gfsa.plug(model, dropout_after=place)
    with registered("eager", scaled):
        with pytest.raises(ValueError, match=r"layers\.0\.self_attn \(Llama\w+\).*not what it m"):
            model.train(training)(ids(), use_cache=False)
        gfsa.unplug(model)
        model(ids())
    assert all("_gfsa_checked" not in m.__dict__ for m in model.modules())


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, attn_implementation="eager", **options))


def test_the_product_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from gfsa.adapters.transformers import functions

    calls: list[Tensor] = []
    compare = functions._gap

    def counting(product: Tensor, *rest: Tensor) -> Any:
        calls.append(product)
        return compare(product, *rest)

    monkeypatch.setattr(functions, "_gap", counting)
    model = llama().eval()
    gfsa.plug(model)
    calls.clear()
    # one token looks the same under any map
    model(ids(1))
    assert len(calls) == 2
    model(ids())
    assert len(calls) == 4
    for _ in range(3):
        model(ids())
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_rounding_and_dropout_are_no_other_map(dtype: torch.dtype, training: bool) -> None:
    model = llama(attention_dropout=0.3).to(dtype).train(training)
    gfsa.plug(model)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :7] = 0
    model(ids(40), attention_mask=mask, use_cache=False)
    assert all("_gfsa_checked" in m.__dict__ for m in model.modules() if hasattr(m, "gfsa"))


def test_weights_before_their_dropout_are_no_other_map() -> None:
    def undropped(*args: Any, **options: Any) -> Any:
        weights, _, product = written_attention(*args, **options)
        return product, weights

    with registered("eager", undropped):
        model = llama(attention_dropout=0.3).train()
        gfsa.plug(model)
        model(ids(), use_cache=False)
    assert all("_gfsa_checked" in m.__dict__ for m in model.modules() if hasattr(m, "gfsa"))


@contextlib.contextmanager
def registered(name: str, function: Callable[..., Any], common: bool = True) -> Iterator[None]:
    """An attention function under a name of transformers' registry, for a while."""
    # register is seen by all models, an item by those that use this instance of the registry
    mapping = (
        ALL_ATTENTION_FUNCTIONS._global_mapping
        if common
        else ALL_ATTENTION_FUNCTIONS._local_mapping
    )
    before = mapping.get(name)
    mapping[name] = function
    try:
        yield
    finally:
        if before is None:
            del mapping[name]
        else:
            mapping[name] = before


@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_an_overridden_entry_of_the_registry_is_what_runs(name: str, common: bool) -> None:
    calls = 0

    def uniform(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        length, groups = q.shape[2], q.shape[1] // v.shape[1]
        weights = torch.ones(length, length).tril()
        weights = (weights / weights.sum(-1, keepdim=True)).expand(*q.shape[:2], -1, -1)
        return (weights @ v.repeat_interleave(groups, 1)).transpose(1, 2), weights

    model = llama().eval()
    model.set_attn_implementation(name)
    gfsa.plug(model)
    ordinary = model(ids()).logits
    with registered(name, uniform, common):
        gfsa.unplug(model)
        before = model(ids()).logits
        assert not torch.allclose(before, ordinary)
        gfsa.plug(model)
        torch.testing.assert_close(model(ids(), use_cache=False).logits, before)
        calls = 0
        randomise(model)
        model(ids(), use_cache=False)
        assert calls == (2 if name == "eager" else 4)
    gfsa.unplug(model)
    gfsa.plug(model)
    torch.testing.assert_close(model(ids()).logits, ordinary)


@pytest.mark.parametrize("name", ["sdpa", "mine"])
@pytest.mark.parametrize("when", ["plug", "forward"])
def test_a_registered_function_that_is_not_linear_in_v_is_refused(when: str, name: str) -> None:
    def squashed(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        groups = q.shape[1] // v.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (y + 0.1 * y.tanh()).transpose(1, 2), None

    model = llama().eval()
    with registered(name, squashed):
        if when == "plug":
            model.set_attn_implementation(name)
            with pytest.raises(ValueError, match="squashed"):
                gfsa.plug(model)
        else:
            gfsa.plug(model)
            model.set_attn_implementation(name)
            with pytest.raises(ValueError, match=r"cannot be filtered.*squashed.*not linear"):
                model(ids(), use_cache=False)


def test_attention_that_an_input_has_switched_is_refused() -> None:
    """A folder of its filters would fit no model that its config builds."""
    size = {"vocab_size": 70, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.BigBirdConfig(**size, intermediate_size=16, block_size=4, num_random_blocks=1)
    model = hf.BigBirdModel(config).eval()
    model(torch.arange(8)[None])
    with pytest.raises(ValueError, match="attention_type='original_full'"):
        gfsa.plug(model)
    config.attention_type = "original_full"
    full = hf.BigBirdModel(config).eval()
    full(torch.arange(8)[None])
    assert len(gfsa.plug(full).plugged) == 2
