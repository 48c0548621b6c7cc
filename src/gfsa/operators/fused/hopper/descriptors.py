"""Descriptors of tensors for the copy engine, as Gluon's kernels take them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.fused.launcher import Block


def describe(x: Tensor, block: Block) -> Any:
    """Tokens in 16 bits, or a float32 number for each: ``(B, H, 1, N)``."""
    descriptor, tokens, numbers = _layouts()
    layout = numbers if x.dtype == torch.float32 else tokens
    return descriptor(x, list(x.shape), list(x.stride()), list(block), layout)


def as_tiles(x: Tensor) -> Tensor:
    """Numbers ``(B, H, N)`` in the four dimensions that launches describe."""
    return x.view(*x.shape[:2], 1, x.shape[2])


@functools.cache
def _layouts() -> tuple[Any, Any, Any]:
    """Gluon is imported when its kernels are first used."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    tokens = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    numbers = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)
    return TensorDescriptor, tokens, numbers
