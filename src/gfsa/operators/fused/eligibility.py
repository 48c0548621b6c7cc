"""What the fused kernels take, and where they are worth taking."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gfsa.operators.choice import Call


def _installed_triton() -> tuple[int, ...]:
    """Triton's version, empty where there is none; it is not imported for this."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


TRITON = _installed_triton()
MINIMAL_TRITON = (3, 6)
MEASURED_TRITON = (3, 6)
MEASURED_CAPABILITY = (9, 0)
# dropout counts entries of one head's map in 32 bits
LONGEST_WITH_DROPOUT = 65536
# CUDA's limit for the second dimension of a launch
MOST_HEADS = 65535


def why_not(call: Call) -> str | None:
    """The reason why the fused kernels cannot serve ``call``, or None if they can."""
    q, v = call.q, call.v
    if call.degree not in (1, 2):
        return f"the fused kernels are for filters of degree 1 and 2, this one has {call.degree}"
    return _why_not_here(q) or _why_not_tokens(q, v) or _why_not_options(call)


def why_not_worth_it(call: Call) -> str | None:
    """The reason why another operator may serve ``call`` better, or None if none does.

    What has not been measured, and on the GPU tested, is left to torch's own kernels.
    """
    length, head_dim = call.q.shape[-2:]
    # taken apart: the compiler cannot compare a tuple that is a constant to it
    major, minor = capability(call.q.device)
    if (major, minor) != MEASURED_CAPABILITY or TRITON != MEASURED_TRITON:
        return "the fused kernels are measured on Hopper GPUs with Triton 3.6 alone"
    if call.degree == 1 and (length > 256 or head_dim > 64):
        # beyond the short kernels the passes are torch's
        if torch.compiler.is_compiling():
            return "the compiler puts what a filter of degree 1 adds into one kernel by itself"
        return None
    if call.attn_mask is not None and not over_keys(call.attn_mask) and length > 256:
        return "with a mask over queries and keys, torch's kernels are faster beyond 256 tokens"
    if head_dim > 64 and (call.attn_mask is not None or call.dropout_p):
        return "masks and dropout are not measured for head dims beyond 64"
    return None


def over_keys(mask: Tensor) -> bool:
    """Whether a mask is the same for every query and head."""
    return _does_not_walk(mask, -2) and same_for_heads(mask)


def same_for_heads(mask: Tensor) -> bool:
    """Whether a mask is the same for every head."""
    return _does_not_walk(mask, -3)


def _does_not_walk(mask: Tensor, dim: int) -> bool:
    return mask.dim() < -dim or mask.shape[dim] == 1 or mask.stride(dim) == 0


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, a constant to the compiler."""
    return _capability(device)


# all that torch.compiler.assume_constant_result does, which imports the whole compiler to do it
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_not_here(q: Tensor) -> str | None:
    if not q.is_cuda or torch.version.hip is not None:
        return f"the fused kernels need an NVIDIA GPU, the tokens are on {q.device}"
    major, minor = capability(q.device)
    if major < 9:
        return (
            "the fused kernels need a GPU of compute capability 9.0 (Hopper) or newer, "
            f"this one has {major}.{minor}"
        )
    if TRITON < MINIMAL_TRITON:
        return f"the fused kernels need Triton {MINIMAL_TRITON} or newer, found {TRITON or 'none'}"
    if q.is_nested or type(q).__name__ == "DTensor":
        return f"the fused kernels take plain tensors, not {type(q).__name__}"
    return None


def _why_not_tokens(q: Tensor, v: Tensor) -> str | None:
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the fused kernels take bfloat16 and float16, not {q.dtype}"
    if q.dim() != 4:
        return f"the fused kernels take tokens (B, H, N, D), got {q.dim()} dimensions"
    if v.shape[-1] != q.shape[-1]:
        return (
            "the fused kernels need values of the queries' head dim "
            f"({q.shape[-1]}), got {v.shape[-1]}"
        )
    if q.shape[-1] % 8 or not 8 <= q.shape[-1] <= 128:
        return (
            f"the fused kernels take head dims up to 128 that are multiples of 8, got {q.shape[-1]}"
        )
    if q.numel() == 0:
        return "there are no tokens"
    if q.shape[0] * q.shape[1] > MOST_HEADS:
        return f"the fused kernels take {MOST_HEADS} heads of all sequences together"
    return None


def _why_not_options(call: Call) -> str | None:
    if call.degree == 1 and call.k.shape[1] != call.q.shape[1]:
        return "the fused kernels of degree 1 take as many heads of keys as of queries"
    if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
        return "the fused kernels take bool masks, not additive ones"
    if call.dropout_p >= 1.0:
        return "the fused kernels drop less than everything"
    if call.dropout_p and call.q.shape[-2] > LONGEST_WITH_DROPOUT:
        return f"the fused kernels take {LONGEST_WITH_DROPOUT} tokens at most with dropout"
    return None
