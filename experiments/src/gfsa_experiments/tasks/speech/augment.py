"""SpecAugment (Park et al., 2019): time warping, then masks over frames and features."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def warp_time(features: Tensor, frames: Tensor, most: int) -> Tensor:
    """Shift one moment of each utterance by up to ``most`` frames; both ends stay in place.

    A moment c is drawn from the utterance and w from [−most, most]; the part before c is stretched
    to c + w frames, the rest to the remaining ones. Linear interpolation, on the device.

    Args:
        features: ``(B, T, F)``.
        frames: ``(B,)``, the numbers of real frames.
        most: the shift is smaller in utterances shorter than three times this.
    """
    B, T, _ = features.shape
    last = (frames[:, None] - 1).to(features.dtype)
    room = (last / 3).clamp_max(most)
    draws = torch.rand(2, B, 1, device=features.device, dtype=features.dtype)
    moment = room + draws[0] * (last - 2 * room)
    moved = moment + (2 * draws[1] - 1) * room
    time = torch.arange(T, device=features.device, dtype=features.dtype).expand(B, T)
    before = time * moment / moved.clamp_min(1e-3)
    after = last - (last - time) * (last - moment) / (last - moved).clamp_min(1e-3)
    source = torch.where(time < moved, before, after)
    # padding stays in place
    source = torch.where(time <= last, source, time).clamp(0, T - 1)
    left = source.floor().long()
    right = (left + 1).clamp_max(T - 1)
    share = (source - left)[:, :, None]
    index = left[:, :, None].expand_as(features), right[:, :, None].expand_as(features)
    return features.gather(1, index[0]).lerp(features.gather(1, index[1]), share)


@lru_cache(maxsize=4)
def masks(time_masks: int, time_width: int, feature_masks: int, feature_width: int) -> Any:
    """torchaudio's SpecAugment: independent masks for each utterance, filled with the mean."""
    from torchaudio.transforms import SpecAugment

    return SpecAugment(
        time_masks, time_width, feature_masks, feature_width,
        iid_masks=True,
        # the largest share that a mask covers
        p=0.5,
        # the features have mean 0
        zero_masking=True,
    )  # fmt: skip
