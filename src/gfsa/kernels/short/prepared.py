"""Prepared launches of the short kernels in eager mode.

Beside kernels of some ten microseconds each Python call counts. What the host does for calls of
one signature is done once; a forward then looks its signature up, allocates three tensors and
launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gfsa.kernels.launcher import launch_on_device_of
from gfsa.kernels.layout import copyable_by_tile, result_strides
from gfsa.kernels.problem import Options, Saved, problem_of
from gfsa.kernels.short import launch as short
from gfsa.operators.call import DecisionCache


class Prepared:
    """The short kernels for tensors of one shape and layout."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options
    ) -> None:
        problem = problem_of(q, k, mask, options)
        self.launch = short.forward_launch(problem)
        self.shape, self.strides = q.shape, result_strides(q)
        self.dtype, self.device = q.dtype, q.device
        self.zero = short.zero(q.device)
        # the launch for these strides, which are fixed by the signature
        self.direct: Callable[..., None] | None = None
        self.backward_launch = short.backward_launch(problem)
        rows = self.backward_launch.blocks[0][2]
        self.parts = (problem.heads, 3, problem.batch * rows)
        # gradients of heads that share keys have to be added up, which is not done here
        self.has_backward = problem.group == 1
        self.mask_strides = None if mask is None else mask.stride()
        self.key_strides, self.value_strides = result_strides(k), result_strides(v)
        # by the strides of the given tensors, which the copy engine takes as they are
        self.direct_backward: dict[tuple[Any, ...], Callable[..., None] | None] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, mask: Tensor | None, seed: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(out, U, LSE)``, as every route's forward."""
        shape, strides, dtype, device = self.shape, self.strides, self.dtype, self.device
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        u = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        lse = torch.empty(shape[:3], dtype=torch.float32, device=device)
        tensors = (q, k, v, u, out)
        pointers = (
            lse,
            coeffs,
            q if mask is None else mask.view(torch.uint8),
            q if seed is None else seed,
            self.zero,
        )
        if self.direct is not None:
            launch_on_device_of(q, self.direct, tensors, pointers)
            return out, u, lse
        launch_on_device_of(q, self.launch, tensors, *pointers)
        self.direct = self.launch.direct.get(tuple([x.stride() for x in tensors]))
        return out, u, lse

    def backward(self, g: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """As every route's backward; None if that has to run."""
        q, k, v, u, out, lse, coeffs, mask, seed = saved
        given = (q, k, v, u, out, g)
        strides = tuple([x.stride() for x in given])
        if not self.has_backward or not self._takes(given, strides):
            return None
        if mask is not None and mask.stride() != self.mask_strides:
            return None
        shape, dtype, device = self.shape, self.dtype, self.device
        dq = torch.empty_strided(shape, self.strides, dtype=dtype, device=device)
        dk = torch.empty_strided(shape, self.key_strides, dtype=dtype, device=device)
        dv = torch.empty_strided(shape, self.value_strides, dtype=dtype, device=device)
        parts = torch.empty(self.parts, dtype=torch.float32, device=device)
        tensors = (*given, dq, dk, dv)
        pointers = (
            lse,
            parts,
            coeffs,
            q if mask is None else mask.view(torch.uint8),
            q if seed is None else seed,
        )
        direct = self.direct_backward[strides]
        if direct is not None:
            launch_on_device_of(q, direct, tensors, pointers)
            return dq, dk, dv, parts
        launch_on_device_of(q, self.backward_launch, tensors, *pointers)
        all_strides = tuple([x.stride() for x in tensors])
        self.direct_backward[strides] = self.backward_launch.direct.get(all_strides)
        return dq, dk, dv, parts

    def _takes(self, given: tuple[Tensor, ...], strides: tuple[Any, ...]) -> bool:
        """Whether the copy engine takes these; hooks may return saved tensors in other layouts."""
        if strides not in self.direct_backward:
            if any(copyable_by_tile(x) is not x for x in given):
                return False
            self.direct_backward[strides] = None
        addresses = 0
        for x in given:
            addresses |= x.data_ptr()
        return addresses % 16 == 0


# False where the short kernels cannot serve without copies
_PREPARED: DecisionCache[Prepared | bool] = DecisionCache()


def prepared_for(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options
) -> Prepared | None:
    """The prepared launches for a call that the short kernels take; None if it needs copies."""
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return None
    signature = (
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), v.stride()),
        None if mask is None else (mask.shape, mask.stride(), mask.dtype),
        options,
    )
    found = _PREPARED.get(signature)
    if found is None:
        found = all(copyable_by_tile(x) is x for x in (q, k, v))
        if found:
            found = Prepared(q, k, v, mask, options)
            if not short.is_kept(found.zero):
                # it is of the CUDA graph that is captured now, and is zero in its replays alone
                return found
        _PREPARED.remember(signature, found)
    return found if isinstance(found, Prepared) else None
