"""Small models whose layers transformers renamed, and filters saved with both names.

``python -m support.renamed`` from the folder ``tests`` writes the files of the installed version of
transformers into ``tests/data/renamed/VERSION``.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

import gfsa
from support.saved_filters import fill_filters, waves

FOLDER = Path(__file__).parents[1] / "data" / "renamed"
VERSIONS = ("5.17.0", "5.22.2")

_SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
_IMAGES = {**_SIZES, "image_size": 8, "patch_size": 4}


def dinov2(**options: Any) -> Any:
    return hf.Dinov2Model(hf.Dinov2Config(**{**_IMAGES, "mlp_ratio": 1, **options}))


def registers() -> Any:
    return hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**_IMAGES, mlp_ratio=1))


def videomae() -> Any:
    config = hf.VideoMAEConfig(**_IMAGES, num_frames=2, use_mean_pooling=False)
    return hf.VideoMAEModel(config)


def clip_text() -> Any:
    sizes = {"vocab_size": 13, "max_position_embeddings": 9, "projection_dim": 8}
    config = hf.CLIPTextConfig(**_SIZES, **sizes, eos_token_id=12)
    return hf.CLIPTextModelWithProjection(config)


def sew_d() -> Any:
    convolutions = {"conv_dim": (8,), "conv_stride": (2,), "conv_kernel": (2,)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = hf.SEWDConfig(
        **_SIZES, **convolutions, **positions, vocab_size=13, squeeze_factor=1, position_buckets=4
    )
    return hf.SEWDForCTC(config)


def mimi() -> Any:
    sizes = {"num_filters": 2, "codebook_size": 8, "codebook_dim": 4, "num_quantizers": 2}
    more = {"vector_quantization_hidden_dimension": 4, "num_key_value_heads": 2, "head_dim": 4}
    config = hf.MimiConfig(**_SIZES, **sizes, **more, upsampling_ratios=[2], upsample_groups=8)
    return hf.MimiModel(config)


def thinker() -> Any:
    text = {**_SIZES, "num_key_value_heads": 2, "vocab_size": 13, "head_dim": 4}
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    audio = {"d_model": 8, "encoder_layers": 1, "encoder_attention_heads": 2}
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8}
    config = hf.Qwen2_5OmniThinkerConfig(
        text_config={**text, "rope_parameters": rotary},
        audio_config={**audio, "encoder_ffn_dim": 8, "output_dim": 8},
        vision_config={**vision, "out_hidden_size": 8, "fullatt_block_indexes": [0]},
    )
    return hf.Qwen2_5OmniThinkerForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "dinov2": dinov2,
    "registers": registers,
    "videomae": videomae,
    "clip_text": clip_text,
    "sew_d": sew_d,
    "mimi": mimi,
    "thinker": thinker,
}
"""One model for each way in which layers were renamed."""


def _pixels(*shape: int) -> Tensor:
    return waves(shape, phase=0.3).float()


INPUTS: dict[str, dict[str, Tensor]] = {
    "dinov2": {"pixel_values": _pixels(1, 3, 8, 8)},
    "registers": {"pixel_values": _pixels(1, 3, 8, 8)},
    "videomae": {"pixel_values": _pixels(1, 2, 3, 8, 8)},
    "clip_text": {"input_ids": torch.tensor([[1, 7, 3, 11, 12]])},
    "sew_d": {"input_values": _pixels(1, 24)},
}
"""Inputs of the models whose outputs are compared; the others are large, or round to codes."""


def filled(model: Any) -> Any:
    """The model with weights that depend on their names on the disk, the same in both versions."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        weights = {}
        for name, weight in load_file(file).items():
            offset = 1.0 if weight.dim() == 1 else 0.0
            # VideoMAE's biases alone have other names on the disk
            older = name.replace("q_bias", "query.bias").replace("v_bias", "value.bias")
            numbers = waves(tuple(weight.shape), phase=zlib.crc32(older.encode()) % 1000)
            weights[name] = (offset + 0.4 * numbers).to(weight.dtype)
        save_file(weights, file, metadata={"format": "pt"})
        return type(model).from_pretrained(folder).eval()


@torch.no_grad()
def output_of(model: Any, name: str) -> Tensor:
    """What the model makes of its fixed input."""
    return model.eval()(**INPUTS[name])[0]


def write() -> None:
    """Write what the installed version saves of every model, and of one model as a whole."""
    hf.logging.set_verbosity_error()
    folder = FOLDER / hf.__version__
    shutil.rmtree(folder, ignore_errors=True)
    outputs = {}
    for name, build in MODELS.items():
        model = filled(build()) if name in INPUTS else build()
        gfsa.plug(model, K=3)
        fill_filters(model)
        gfsa.save(model, folder / name)
        if name in INPUTS:
            outputs[name] = output_of(model, name).tolist()
        if name == "dinov2":
            model.save_pretrained(folder / "pretrained")
    text = json.dumps(outputs) + "\n"
    (folder / "expected.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
