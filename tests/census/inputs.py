"""Random inputs for a model, made from the signature of its forward and from its config."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from census.shrink import IMAGE, VOCABULARY

Batch = dict[str, Any]

FIRST_TOKEN, LAST_TOKEN = 10, 60
"""Tokens between these have no special meaning in any tiny config."""

_SOURCES = (
    "input_ids",
    "pixel_values",
    "input_features",
    "input_values",
    "inputs",
    "past_values",
    "pixel_values_videos",
    "audio_values",
    "flattened_patches",
    "hidden_states",
    "states",
)


def attempts(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Sets of sources to try, from the model's main input alone to everything it can take."""
    known = tuple(inspect.signature(model.forward).parameters)
    if type(model).__module__.startswith("timm."):
        yield ("x",)
        return
    sources = [name for name in _SOURCES if name in known]
    main = getattr(model, "main_input_name", None)
    if main in sources:
        sources.remove(main)
        sources.insert(0, main)
    for count in range(1, len(sources) + 1):
        for rest in itertools.combinations(sources[1:], count - 1):
            yield from itertools.product(*(_VARIANTS[name] for name in (*sources[:1], *rest)))


def batch_for(
    model: nn.Module, sources: tuple[str, ...], samples: int, length: int, seed: int = 1
) -> Batch:
    """Inputs of ``samples`` samples; ``length`` counts tokens, or steps of 4 pixels or frames.

    Rows after the first have padding at their end where the model takes an attention mask.
    """
    config: Any = getattr(model, "config", None)
    if sources == ("x",):
        size = getattr(model, "census_image_size", IMAGE)
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(samples, 3, size, size, generator=generator)}
    known = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(seed)
    batch: Batch = {}
    for variant in sources:
        name = variant.partition(" ")[0]
        batch[name] = _SOURCE[variant](config, samples, length, generator)
    if "grid_thw" in known:
        batch.update(_grid(config, samples, generator, next(iter(batch), "hidden_states")))
    if "input_ids" in batch and "attention_mask" in known:
        mask = torch.ones(samples, length, dtype=torch.long)
        mask[1:, -2:] = 0
        batch["attention_mask"] = mask
    if "decoder_input_ids" in known and (
        getattr(config, "is_encoder_decoder", False) or "input_ids" not in batch
    ):
        batch["decoder_input_ids"] = _ids(config, samples, length - 2, generator)
    if "bbox" in known:
        corner = torch.randint(0, 40, (samples, length, 2), generator=generator)
        batch["bbox"] = torch.cat([corner, corner + 5], -1)
    batch.update(_companions(known, config, batch, samples, generator))
    if "past_values" in batch:
        batch.update(_series(known, config, samples, generator))
    return batch


def _companions(
    known: Any, config: Any, batch: Batch, samples: int, generator: torch.Generator
) -> Batch:
    """What some models ask for beside their sources."""
    found: Batch = {}
    if "image_embeds_position_mask" in known and {"input_ids", "pixel_values"} <= set(batch):
        # where in the text the image goes
        found["image_embeds_position_mask"] = torch.zeros_like(batch["input_ids"])
        found["image_embeds_position_mask"][:, : config.latent_query_num] = 1
    if "visual_feats" in known and "visual_pos" in known:
        width = lookup(config, "visual_feat_dim", default=32)
        found["visual_feats"] = torch.randn(samples, 5, width, generator=generator)
        found["visual_pos"] = torch.rand(samples, 5, 4, generator=generator)
    if "input_features_mask" in known and "input_features" in batch:
        features = batch["input_features"]
        frames = max(features.shape[1:])
        found["input_features_mask"] = torch.ones(samples, frames, dtype=torch.long)
    if "states" in batch:
        length = batch["states"].shape[1]
        found["actions"] = torch.randn(samples, length, config.act_dim, generator=generator)
        found["rewards"] = torch.randn(samples, length, 1, generator=generator)
        found["returns_to_go"] = torch.randn(samples, length, 1, generator=generator)
        found["timesteps"] = torch.arange(length).expand(samples, -1).contiguous()
        found["attention_mask"] = torch.ones(samples, length, dtype=torch.long)
    if "prompt_pixel_values" in known:
        found["prompt_pixel_values"] = torch.randn(batch["pixel_values"].shape, generator=generator)
        found["prompt_masks"] = torch.rand(batch["pixel_values"].shape, generator=generator)
    if "spatial_shapes" in known and batch.get("pixel_values", torch.empty(0)).dim() == 3:
        found["spatial_shapes"] = torch.tensor([[4, 4]] * samples)
        found["pixel_attention_mask"] = torch.ones(samples, 16, dtype=torch.long)
    return {name: x for name, x in found.items() if name in known}


def _ids(config: Any, samples: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(FIRST_TOKEN, LAST_TOKEN, (samples, length), generator=generator)


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _configs(inner)


def lookup(config: Any, *names: str, default: Any) -> Any:
    """The first of these attributes in a config or in a config inside it."""
    for holder in _configs(config):
        for name in names:
            value = vars(holder).get(name)
            if isinstance(value, int | list | tuple) and value is not True:
                return value
    return default


def _pixels(config: Any, samples: int, length: int, generator: torch.Generator) -> Tensor:
    # a model without a size of its own has a backbone with a stride of 32
    size = lookup(config, "image_size", "img_size", "pretrain_image_size", default=3 * IMAGE)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = lookup(config, "num_channels", "in_chans", "in_channels", default=3)
    channels = channels if isinstance(channels, int) else 3
    return torch.randn(samples, channels, height, width, generator=generator)


def _video(config: Any, samples: int, length: int, generator: torch.Generator) -> Tensor:
    frames = lookup(config, "num_frames", "frames_per_clip", default=4)
    image = _pixels(config, samples, length, generator)
    return image[:, None].expand(-1, frames, -1, -1, -1).contiguous()


def _features(config: Any, samples: int, length: int, generator: torch.Generator) -> Tensor:
    names = ("num_mel_bins", "feature_size", "n_mels", "input_dim", "input_feat_per_channel")
    bins = lookup(config, *names, default=80)
    frames = 2 * lookup(config, "max_source_positions", default=2 * length)
    return torch.randn(samples, bins, frames, generator=generator)


def _past(config: Any, samples: int, length: int, generator: torch.Generator) -> Tensor:
    window = lookup(config, "context_length", default=length)
    if getattr(config, "model_type", "").startswith("patchts"):
        return torch.randn(samples, window, config.num_input_channels, generator=generator)
    lags = lookup(config, "lags_sequence", default=[0]) or [0]
    return torch.randn(samples, window + max(lags), generator=generator).abs()


def _series(known: Any, config: Any, samples: int, generator: torch.Generator) -> Batch:
    past = _past(config, samples, 8, generator)
    window = past.shape[1]
    later = lookup(config, "prediction_length", default=8)
    time = max(lookup(config, "num_time_features", default=1), 1)
    whole = {
        "past_time_features": torch.randn(samples, window, time, generator=generator),
        "past_observed_mask": torch.ones(past.shape),
        "future_values": torch.randn(samples, later, generator=generator).abs(),
        "future_time_features": torch.randn(samples, later, time, generator=generator),
    }
    return {name: value for name, value in whole.items() if name in known}


def _states(config: Any, samples: int, length: int, generator: torch.Generator) -> Tensor:
    width = lookup(config, "state_dim", "d_model", default=32)
    return torch.randn(samples, length, width, generator=generator)


def _sound(config: Any, samples: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randn(samples, 400 * length, generator=generator)


def _patches(config: Any, samples: int, length: int, generator: torch.Generator) -> Tensor:
    width = lookup(config, "patch_embed_hidden_size", default=768)
    patches = torch.randn(samples, length, 2 + width, generator=generator)
    patches[..., :2] = torch.arange(length)[:, None] % 4
    return patches


def _patch_rows(config: Any, samples: int, length: int, generator: torch.Generator) -> Tensor:
    patch = lookup(config, "patch_size", default=8)
    return torch.randn(samples, 16, 3 * patch * patch, generator=generator)


def _spectrogram(config: Any, samples: int, length: int, generator: torch.Generator) -> Tensor:
    bins = lookup(config, "num_mel_bins", default=128)
    frames = lookup(config, "max_length", default=4 * length)
    return torch.randn(samples, frames, bins, generator=generator)


def _grid(config: Any, samples: int, generator: torch.Generator, name: str) -> Batch:
    """Patches of ``samples`` images of 4 × 4 patches, one after another, and their grids."""
    patch = lookup(config, "patch_size", default=8)
    patch = patch if isinstance(patch, int) else patch[0]
    frames = lookup(config, "temporal_patch_size", default=1)
    channels = lookup(config, "in_channels", "num_channels", "in_chans", default=3)
    width = channels * frames * patch * patch
    return {
        name: torch.randn(samples * 16, width, generator=generator),
        "grid_thw": torch.tensor([[1, 4, 4]] * samples),
    }


_SOURCE: dict[str, Callable[..., Tensor]] = {
    "pixel_values video": _video,
    "pixel_values patches": _patch_rows,
    "input_features last": lambda *about: _features(*about).transpose(1, 2).contiguous(),
    "inputs ids": _ids,
    "input_values mono": lambda *about: _sound(*about)[:, None],
    "input_values mel": _spectrogram,
    "hidden_states": _states,
    "states": _states,
    "input_ids": _ids,
    "pixel_values": _pixels,
    "pixel_values_videos": _video,
    "input_features": _features,
    "input_values": _sound,
    "audio_values": _sound,
    "inputs": _states,
    "past_values": _past,
    "flattened_patches": _patches,
}
_VARIANTS = {
    name: [variant for variant in sorted(_SOURCE) if variant.partition(" ")[0] == name]
    for name in _SOURCES
}
"""A source may come in several shapes, which are tried one after another."""
assert LAST_TOKEN < VOCABULARY
