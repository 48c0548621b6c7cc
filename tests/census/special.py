"""What the rules of ``census.shrink`` do not find, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _resnet() -> Any:
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )


def _resnet_stages() -> Any:
    config = _resnet()
    config.out_features = ["stage2", "stage3", "stage4"]
    return config


def _vocabulary_map() -> dict[str, int]:
    return {"<image>": 98}


def _dbrx_attention() -> Any:
    from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig

    return DbrxAttentionConfig(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0)


_SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
# segmentation models take the features of four stages; no stage may be smaller than a window
_SWIN_STAGES = {
    **_SWIN,
    "image_size": 64,
    "embed_dim": 8,
    "depths": [2, 1, 1, 1],
    "num_heads": [2, 2, 4, 4],
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
_DETR: dict[str, Any] = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": _resnet,
}
_SERIES: dict[str, Any] = {
    "prediction_length": 9,
    "context_length": 12,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
    "input_size": 1,
}

# a value that is a function is called for the value
SPECIAL: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {
        "max_length": 32,
        "num_mel_bins": 16,
        "patch_size": 8,
        "frequency_stride": 8,
        "time_stride": 8,
    },
    "autoformer": _SERIES,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bit": {"num_groups": 2},
    # its heads are 64 wide
    "bridgetower": {"hidden_size": 128},
    "bridgetower_text_model": {"hidden_size": 128},
    "bridgetower_vision_model": {"hidden_size": 128},
    "bros": {"hidden_size": 64},
    "chameleon": {"vocabulary_map": _vocabulary_map},
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "dbrx": {"attn_config": _dbrx_attention},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deformable_detr": {**_DETR, "backbone_config": _resnet_stages},
    "detr": _DETR,
    "donut-swin": _SWIN,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": _vocabulary_map},
    "esm": {"vocab_size": 99, "pad_token_id": 1, "mask_token_id": 98},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": None,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "glm5_next_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 5},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "informer": _SERIES,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "kosmos-2": {"latent_query_num": 4},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "input_size": 32},
    "levit": {"image_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "maskformer-swin": _SWIN,
    "lw_detr_vit": {"num_windows": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "mimi": {"upsample_groups": 32},
    "ministral": {"head_dim": 8},
    "mobilevitv2": {"image_size": 64},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 1},
    "patchtst": {"context_length": 32, "patch_length": 4, "patch_stride": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    # the last stage, which is not reduced, has more than one token
    "pvt_v2": {"image_size": 128},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "max_position_embeddings": 64,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "attn_layers": ["local", "lsh"],
        "hash_seed": 0,
    },
    "sam_vision_model": {"output_channels": 32, "num_pos_feats": 16},
    "sam_hq_vision_model": {"output_channels": 32, "num_pos_feats": 16},
    "swin": _SWIN_STAGES,
    "swinv2": _SWIN,
    "swin2sr": {**_SWIN, "depths": [2, 2], "num_heads": [2, 2]},
    "table-transformer": _DETR,
    "time_series_transformer": _SERIES,
    "vitpose_backbone": {"image_size": [32, 32], "patch_size": [8, 8]},
    "vjepa2": {
        "crop_size": 16,
        "patch_size": 8,
        "frames_per_clip": 4,
        "pred_hidden_size": 32,
        "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 2,
    },
}


_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def _bert(**changes: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(**_SIZES, vocab_size=99, **changes)


def _vit() -> Any:
    from transformers import ViTConfig

    return ViTConfig(**_SIZES, image_size=32, patch_size=8)


def _with_decoder(kind: str, encoder: Callable[[], Any]) -> Any:
    import transformers

    decoder = _bert(is_decoder=True, add_cross_attention=True)
    return getattr(transformers, kind).from_encoder_decoder_configs(
        encoder(), decoder, decoder_start_token_id=1, pad_token_id=0
    )


def _vision_text() -> Any:
    from transformers import VisionTextDualEncoderConfig

    return VisionTextDualEncoderConfig.from_vision_text_configs(_vit(), _bert(), projection_dim=32)


WHOLE: dict[str, Callable[[], Any]] = {
    "encoder-decoder": lambda: _with_decoder("EncoderDecoderConfig", _bert),
    "vision-encoder-decoder": lambda: _with_decoder("VisionEncoderDecoderConfig", _vit),
    "vision-text-dual-encoder": _vision_text,
}
"""Types whose default config cannot be built: a function that returns a whole config."""
