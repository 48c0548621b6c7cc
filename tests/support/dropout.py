"""Which entries the fused kernels drop, written a second time."""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def surviving(
    batch: int, heads: int, length: int, seed: int, dropout_p: float, device: str = "cpu"
) -> Tensor:
    """True where an entry of the map stays.

    Philox2x32-7 on ``((i // 2)·⌈n/2⌉ + j // 2, b·H + h)``; the first word is for even i, its lower
    16 bits for even j.
    """
    pairs = (length + 1) // 2
    half = torch.arange(length, device=device) // 2
    low = (half[:, None] * pairs + half).flatten().expand(batch * heads, -1)
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
    odd = torch.arange(length, device=device) % 2
    shape = (batch * heads, length, length)
    word = torch.where(odd[:, None] == 1, high.reshape(shape), low.reshape(shape))
    number = (word >> (16 * odd)) & 0xFFFF
    return (number + 0.5 >= dropout_p * 65536).view(batch, heads, length, length)
