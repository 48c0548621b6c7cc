"""Models whose keys an indexer chooses: a plugged layer sees the chosen keys and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gfsa

transformers = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
_BLOCKS = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 8,
    "dense_intermediate_size": 32,
    "shared_intermediate_size": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["minimax_m3_sparse"] * 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 2,
}
# model → its config, its options, and the option that says how many keys are chosen
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "DeepseekV32Model": ("DeepseekV32Config", _LATENT, "index_topk"),
    "GlmMoeDsaModel": ("GlmMoeDsaConfig", _LATENT, "index_topk"),
    "AXK2Model": ("AXK2Config", _LATENT, "index_topk"),
    "HYV4Model": ("HYV4Config", {**_LATENT, "head_dim": 16}, "index_topk"),
    "MiniMaxM3VLTextModel": ("MiniMaxM3VLTextConfig", _BLOCKS, "index_topk_blocks"),
    # the second layer uses the keys of the first
    "MistralLarge4TextModel": (
        "MistralLarge4TextConfig",
        {**_LATENT, "kv_source_layers": [0, 0], "no_rope_layers": [1, 1]},
        "index_topk",
    ),
}
# attention sinks, which sdpa has no place for
_EAGER_ONLY = ("HYV4Model",)
CASES = [
    pytest.param(
        *(name, implementation),
        marks=pytest.mark.skipif(
            not hasattr(transformers, name), reason=f"transformers has no {name} yet"
        ),
    )
    for name in MODELS
    for implementation in ("sdpa", "eager")
    if not (implementation == "sdpa" and name in _EAGER_ONLY)
]


def build(name: str, implementation: str, chosen: int = 3) -> Any:
    config_name, options, count = MODELS[name]
    options = {**_SIZES, **options, count: chosen}
    config = getattr(transformers, config_name)(**options, attn_implementation=implementation)
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


def ids() -> Tensor:
    return torch.randint(3, 32, (2, 14), generator=torch.Generator().manual_seed(1))


def output(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids(), use_cache=False, **inputs).last_hidden_state
    return found


@pytest.mark.parametrize(("name", "implementation"), CASES)
@pytest.mark.parametrize("padded", [False, True])
def test_a_new_filter_changes_nothing(name: str, implementation: str, padded: bool) -> None:
    mask = torch.ones_like(ids())
    mask[0, -3:] = 1 - int(padded)
    model = build(name, implementation)
    plain = output(model, attention_mask=mask)
    # the choice matters here
    everything = output(build(name, implementation, chosen=14), attention_mask=mask)
    assert (plain - everything).abs().max() > 1e-2
    report = gfsa.plug(model)
    assert len(report.plugged) == 2
    seen = mask.bool()
    torch.testing.assert_close(output(model, attention_mask=mask)[seen], plain[seen])


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_every_power_sees_the_chosen_keys_alone(name: str, implementation: str) -> None:
    """The choice of the first layer is that of its inputs, which no filter has changed."""
    model = build(name, implementation)
    maps = []
    gfsa.plug(model, layers=[1], w0=0.2, w1=0.5, wK=0.3, K=2)
    (layer,) = (m for m in model.modules() if hasattr(m, "gfsa"))
    layer.gfsa.register_forward_pre_hook(lambda _, args: maps.append(args[0].dense()))
    layer.gfsa.register_forward_hook(lambda _, args, y: maps.extend((args[1], y)))
    output(model)
    attention, value, found = maps
    value = value.repeat_interleave(found.shape[1] // value.shape[1], dim=1)
    assert ((attention > 0).sum(-1) <= 6).all()
    expected = 0.2 * value + 0.5 * attention @ value + 0.3 * attention @ attention @ value
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
