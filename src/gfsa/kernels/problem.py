"""Records of a call to the fused kernels: its options, its sizes, what its gradient needs."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

# kinds of mask, as compile-time numbers
NO_MASK = 0
KEY_MASK = 1
FULL_MASK = 2
SPANS = 3


class Options(NamedTuple):
    """The numbers of a call, as one record beside its tensors."""

    scale: float
    is_causal: bool = False
    dropout_p: float = 0.0
    exclusive: bool = False
    """Whether the last column of the coefficients is the share of the exclusive term."""


class Saved(NamedTuple):
    """What a forward pass saves for its gradient.

    Args:
        q, k, v: the tokens.
        u: ``A·V``.
        out: the filter's output.
        lse: each row's natural logsumexp, ``(B, H, N)``.
        coeffs: ``(H, 3)``, float32, contiguous.
        mask, seed: as in the forward pass.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    u: Tensor
    out: Tensor
    lse: Tensor
    coeffs: Tensor
    mask: Tensor | None = None
    seed: Tensor | None = None


class Problem(NamedTuple):
    """What launches depend on: calls with equal problems differ in their tensors alone."""

    batch: int
    heads: int
    key_heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    device: int | None
    options: Options
    mask_strides: tuple[int, int, int, int]
    """Over ``(B, H, N, N)``."""
    mask_kind: int

    @property
    def group(self) -> int:
        """Query heads that share one head of keys."""
        return self.heads // self.key_heads

    @property
    def variant(self) -> tuple[Any, ...]:
        """What compiled code depends on.

        Triton compiles separately for lengths that are multiples of 16, for ones, and for numbers
        that need 64 bits.
        """
        return (
            self.device,
            self.dtype,
            self.length % 16 == 0,
            self.length == 1,
            self.group == 1,
            self.group % 16 == 0,
            *(stride >= 2**31 for stride in self.mask_strides),
        )


def are_spans(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a mask is given by the spans of what queries see, int32 ``(B or 1, 2, N)``.

    Under causality query i sees the keys ``spans[:, 0, i] … i``, and key j is seen by the queries
    ``j … spans[:, 1, j]``. Neither of them decreases. Documents and windows are such masks: see
    :meth:`gfsa.operators.visibility.Visibility.spans`.
    """
    return mask is not None and mask.dtype == torch.int32


def problem_of(q: Tensor, k: Tensor, mask: Tensor | None, options: Options) -> Problem:
    """The problem that a call poses.

    Args:
        q: ``(B, H, N, D)``; k: ``(B, H / group, N, D)``.
        mask: bool, broadcastable to ``(B, H, N, N)``; or spans, see :func:`are_spans`.
    """
    batch, heads, length, head_dim = q.shape
    strides, kind = (0, 0, 0, 0), NO_MASK
    if are_spans(mask):
        # one row for all sequences, or a row for each
        strides, kind = (0 if mask.shape[0] == 1 else 2 * length, 0, 0, 0), SPANS
    elif mask is not None:
        strides, kind = _mask_layout(mask.shape, mask.stride(), length)
    return Problem(
        batch,
        heads,
        k.shape[1],
        length,
        head_dim,
        q.dtype,
        q.device.index,
        options,
        strides,
        kind,
    )


@functools.lru_cache(maxsize=1024)
def _mask_layout(
    shape: torch.Size, strides: tuple[int, ...], length: int
) -> tuple[tuple[int, int, int, int], int]:
    """A mask's strides over ``(B, H, N, N)`` and its kind."""
    missing = 4 - len(shape)
    # a broadcast dimension has stride 0; one sequence of a batch may serve them all
    used = [s if n > 1 else 0 for s, n in zip(strides, shape, strict=True)]
    b, h, i, j = (*(0,) * missing, *used)
    return (b, h, i, j), KEY_MASK if i == 0 or length == 1 else FULL_MASK


def pointers(mask: Tensor | None, seed: Tensor | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Mask and seed as kernels take them; ``unused``, which is never read, replaces None."""
    if mask is None:
        mask = unused
    elif are_spans(mask):
        mask = mask.contiguous()
    else:
        mask = mask.view(torch.uint8)
    return mask, unused if seed is None else seed


def padded(size: int) -> int:
    """The next power of two, 16 at least: what a tile's side may be."""
    return max(16, 1 << (size - 1).bit_length())
