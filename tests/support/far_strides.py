"""Views whose entries lie so far apart that their distance does not fit into 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor

PAST_INT32 = 2**31
"""Elements: the least distance that 32 bits cannot count."""


def spread(x: Tensor, dim: int) -> Tensor:
    """A copy of ``x`` whose last entry along ``dim`` lies ``PAST_INT32`` elements behind the first.

    The memory between the entries is reserved and never touched, so on a CPU it takes no room.
    """
    count = x.shape[dim]
    # rows of 16 bytes stay aligned
    step = -(-PAST_INT32 // (count - 1) // 64) * 64 + 64
    others = [size for at, size in enumerate(x.shape) if at != dim % x.dim()]
    strides = list(torch.empty(others, device="meta").stride())
    strides.insert(dim % x.dim(), step)
    room = step * (count - 1) + x.numel()
    assert max(strides) * (count - 1) >= PAST_INT32
    far = torch.empty(room, dtype=x.dtype, device=x.device).as_strided(x.shape, strides)
    return far.copy_(x)
