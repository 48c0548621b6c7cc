"""Attention of transformers that has no square map over its own tokens is refused, never filtered.

By plug where class, signature and settings show it; by the first forward where only the numbers do.
"""

from __future__ import annotations

import ast
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
from gfsa.adapters.transformers.refusals import OTHER_TOKENS, QUERY_AND_KEY
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
PYRAMID = {
    "hidden_sizes": [8, 16, 16, 16],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 2],
    "mlp_ratios": [1, 1, 1, 1],
}


def ids(length: int = 10) -> Tensor:
    return torch.randint(6, 61, (2, length), generator=torch.Generator().manual_seed(0))


def pixels(size: int, batch: int = 2) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size)}


def sam() -> tuple[nn.Module, dict[str, Any]]:
    vision = {
        "hidden_size": 16,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "window_size": 2,
        "global_attn_indexes": [1],
        "mlp_dim": 16,
        "num_pos_feats": 8,
    }
    prompt = {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
    decoder = {"hidden_size": 16, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 8}
    config = hf.SamConfig(
        vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
    )
    # 5 tokens of the decoder and 11 of ten points and their end: as many as the 16 of the image
    points = torch.rand(1, 1, 10, 2) * 32
    return hf.SamModel(config), {**pixels(32, batch=1), "input_points": points}


def kosmos() -> tuple[nn.Module, dict[str, Any]]:
    text = {"vocab_size": 61, "embed_dim": 32, "layers": 2, "attention_heads": 4, "ffn_dim": 32}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    config = hf.Kosmos2Config(text_config=text, vision_config=vision, latent_query_num=4)
    where = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0, 0]] * 2)
    batch = {**pixels(16), "input_ids": ids(), "image_embeds_position_mask": where}
    return hf.Kosmos2Model(config), batch


def informer() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.InformerConfig(
        prediction_length=4,
        context_length=8,
        input_size=1,
        lags_sequence=[1],
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_time_features=1,
        attention_type="prob",
        distil=False,
    )
    batch = {
        "past_values": torch.randn(2, 9),
        "past_time_features": torch.randn(2, 9, 1),
        "past_observed_mask": torch.ones(2, 9),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 1),
    }
    return hf.InformerModel(config), batch


def pvt() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.PvtConfig(image_size=64, sequence_reduction_ratios=[4, 2, 2, 1], **PYRAMID)
    return hf.PvtModel(config), pixels(64)


def pvt_v2(linear: bool) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.PvtV2Config(
        image_size=64, sr_ratios=[4, 2, 2, 1], linear_attention=linear, **PYRAMID
    )
    return hf.PvtV2Model(config), pixels(64)


def deepseek_v4() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.DeepseekV4Config(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        q_lora_rank=16,
        head_dim=8,
        o_groups=2,
        o_lora_rank=8,
        moe_intermediate_size=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=64,
    )
    return hf.DeepseekV4ForCausalLM(config), {"input_ids": ids(), "use_cache": False}


BLOCKS = "bands or blocks"
REDUCED = "not square"
CROSSING = "different tokens"
Build = Callable[[], tuple[nn.Module, dict[str, Any]]]
NOTHING_LEFT: dict[str, tuple[Build, str]] = {
    "informer": (informer, "order"),
    "pvt-v2-linear": (lambda: pvt_v2(True), REDUCED),
    "deepseek-v4": (deepseek_v4, "its keys are its tokens and compressed ones"),
}


@pytest.mark.parametrize("name", NOTHING_LEFT)
def test_a_model_without_any_square_map_is_refused_as_a_whole(name: str) -> None:
    build, reason = NOTHING_LEFT[name]
    model, batch = build()
    with pytest.raises(ValueError, match="found no self-attention") as caught:
        gfsa.plug(model)
    assert reason in str(caught.value)
    with torch.no_grad():
        model.eval()(**batch)


def sam_attention() -> SamAttention:
    torch.manual_seed(0)
    config = hf.SamMaskDecoderConfig(hidden_size=16, num_attention_heads=2)
    config._attn_implementation = "sdpa"
    return SamAttention(config, downsample_rate=1).eval()


def idefics() -> tuple[nn.Module, dict[str, Any]]:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    perceiver = {"resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 4}
    perceiver |= {"resampler_head_dim": 8, "num_key_value_heads": 2, "hidden_size": 32}
    config = hf.Idefics2Config(
        text_config={"model_type": "mistral", **TEXT},
        vision_config=vision,
        perceiver_config=perceiver,
        image_token_id=5,
    )
    tokens = torch.cat([torch.full((2, 3), 5), ids()], 1)
    images = torch.randn(2, 1, 3, 16, 16)
    return hf.Idefics2Model(config), {"input_ids": tokens, "pixel_values": images}


def mask2former() -> tuple[nn.Module, dict[str, Any]]:
    backbone = hf.SwinConfig(
        image_size=32,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = hf.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        num_attention_heads=2,
        encoder_layers=1,
        decoder_layers=2,
        num_queries=5,
    )
    return hf.Mask2FormerModel(config), pixels(64, batch=1)


# models that the census cannot run
REFUSED: dict[str, tuple[Build, int, dict[str, int]]] = {
    "idefics2": (idefics, 4, {CROSSING: 1}),
    "mask2former": (mask2former, 5, {"sample": 1, CROSSING: 1}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plug_says_what_the_first_forward_would(name: str) -> None:
    build, plugged, reasons = REFUSED[name]
    torch.manual_seed(0)
    model, batch = build()
    model.eval()
    report = gfsa.plug(model)
    assert len(report.plugged) == plugged
    assert len(report.skipped) == sum(reasons.values())
    for words, count in reasons.items():
        assert sum(words in reason for reason in report.skipped.values()) == count
    randomise(model)
    with torch.no_grad():
        model(**batch)


@pytest.mark.parametrize(
    ("kind", "plugged", "skipped"),
    [
        # of its backbone, the layers between stages pool their queries
        ("Sam2", 9 + 2, {"pooled": 3, CROSSING: 5}),
        ("EdgeTamVideo", 9 + 2 + 2 + 2, {"pooled": 3, CROSSING: 9}),
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


# arguments of attention modules that hold no other sequence
HARMLESS = {
    "hidden_states", "position_embeddings", "attention_mask", "past_key_values", "cu_seqlens",
    "max_seqlen", "output_attentions", "value", "attention_similarity", "mask", "position_bias",
    "position_ids", "encoder_attention_mask", "use_cache", "relative_position_embeddings",
    "encoder_position_embeddings", "shared_kv_states", "prev_topk_indices", "codebook_idx",
    "num_k_exclude_rope", "query_position_embeddings", "query_sine_embed", "v", "layer_past",
    "position_embeddings_k", "rope_k_repeat", "positional_encoding", "attention_bias",
    "input_features_mask", "cycle_offset", "latents", "conv_mask", "freqs_ci", "value_tensor",
    "value_embeds", "height", "width", "merged_attention_mask", "position_mask", "values",
    "layer_idx", "attention_scaling",
}  # fmt: skip


def signatures() -> Iterator[tuple[str, list[str]]]:
    """Every class of the installed transformers that uses the interface, and its arguments."""
    for path in sorted((Path(hf.__file__).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if "ALL_ATTENTION_FUNCTIONS" not in source:
            continue
        for node in ast.parse(source).body:
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    names = {x.id for x in ast.walk(method) if isinstance(x, ast.Name)}
                    if "ALL_ATTENTION_FUNCTIONS" in names:
                        arguments = (*method.args.args[1:], *method.args.kwonlyargs)
                        yield node.name, [argument.arg for argument in arguments]


def test_every_argument_that_may_hold_other_tokens_is_known() -> None:
    compared = {name for pair in QUERY_AND_KEY for name in pair}
    known = HARMLESS | OTHER_TOKENS | compared
    found = dict(signatures())
    assert len(found) > 200
    unknown = {kind: set(names) - known for kind, names in found.items() if set(names) - known}
    assert not unknown, f"look whether these hold the tokens of another sequence: {unknown}"


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


@pytest.mark.parametrize("place", ["attention", "filter"])
@pytest.mark.parametrize("training", [False, True])
def test_weights_that_are_not_what_was_multiplied_are_refused_by_a_forward(
    place: Any, training: bool
) -> None:
    """As after a switch of the implementation, or where plug cannot try the function."""

    def scaled(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        weights = (q @ k.transpose(-2, -1) * options["scaling"] + mask).softmax(-1)
        weights = torch.dropout(weights, options["dropout"], module.training)
        return 0.9 * (weights @ v).transpose(1, 2), weights

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
    def undropped(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-2, -1) * options["scaling"] + mask
        weights = scores.softmax(-1)
        dropped = torch.dropout(weights, options["dropout"], module.training)
        return (dropped @ v).transpose(1, 2), weights

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
