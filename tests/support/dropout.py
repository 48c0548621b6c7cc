"""Which entries the fused kernels drop, written a second time."""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def surviving(
    batch: int, heads: int, length: int, seed: int, dropout_p: float, device: str = "cpu"
) -> Tensor:
    """Philox2x32-7 on ``(i·n + j, b·H + h)``: True where an entry of the map stays."""
    low = torch.arange(length * length, device=device).expand(batch * heads, -1)
    high = torch.arange(batch * heads, device=device)[:, None].expand_as(low)
    key = seed & _LOW
    for _ in range(7):
        # the product of two 32-bit numbers in two halves: it does not fit into a signed int64
        upper, lower = low >> 16, low & 0xFFFF
        first = upper * 0xD256D193
        second = lower * 0xD256D193
        product_high = (first + (second >> 16)) >> 16
        product_low = ((first << 16) + second) & _LOW
        low, high = product_high ^ key ^ high, product_low
        key = (key + 0x9E3779B9) & _LOW
    uniform = (low >> 1).float() * 2.0**-31
    return (uniform >= dropout_p).view(batch, heads, length, length)
