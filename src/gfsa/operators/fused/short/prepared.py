"""The short kernels in eager mode: what the host does for calls of one signature, done once.

Around kernels of some ten microseconds every Python call counts: a forward here looks its
signature up, makes room for three tensors and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.fused.launcher import copyable_by_tile, empty_like, launch_beside
from gfsa.operators.fused.long.launch import Options, problem_of
from gfsa.operators.fused.short import launch as short


class Ready:
    """The short kernels for tensors of one shape and layout."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
        problem = problem_of(q, k, options)
        self.launch = short.forward_launch(problem)
        self.shape, self.strides = q.shape, empty_like(q).stride()
        self.dtype, self.device = q.dtype, q.device
        self.zero = short.zero(q.device)
        # past the look at strides, which are the signature's
        self.direct: Callable[..., None] | None = None
        self.launch_back = short.backward_launch(problem)
        rows = self.launch_back.blocks[0][2]
        self.parts = (problem.heads, 3, problem.batch * rows)
        # heads that share keys are added up, which is not done here
        self.goes_back = problem.group == 1
        self.mask_strides = None if options.mask is None else options.mask.stride()
        self.key_strides = [empty_like(x).stride() for x in (k, v)]
        # by strides of tensors that the copy engine takes as they are
        self.direct_back: dict[tuple[Any, ...], Callable[..., None] | None] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, mask: Tensor | None, seed: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(out, U, LSE)``, as :func:`gfsa.operators.fused.long.launch.forward`."""
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
            launch_beside(q, self.direct, tensors, pointers)
            return out, u, lse
        launch_beside(q, self.launch, tensors, *pointers)
        self.direct = self.launch.direct.get(tuple([x.stride() for x in tensors]))
        return out, u, lse

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        u: Tensor,
        out: Tensor,
        lse: Tensor,
        coeffs: Tensor,
        mask: Tensor | None,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """As :func:`gfsa.operators.fused.long.launch.backward`; None if that has to do it."""
        given = (q, k, v, u, out, g)
        strides = tuple([x.stride() for x in given])
        if not self.goes_back or not self._takes(given, strides):
            return None
        if mask is not None and mask.stride() != self.mask_strides:
            return None
        shape, dtype, device = self.shape, self.dtype, self.device
        of_keys, of_values = self.key_strides
        dq = torch.empty_strided(shape, self.strides, dtype=dtype, device=device)
        dk = torch.empty_strided(shape, of_keys, dtype=dtype, device=device)
        dv = torch.empty_strided(shape, of_values, dtype=dtype, device=device)
        parts = torch.empty(self.parts, dtype=torch.float32, device=device)
        tensors = (*given, dq, dk, dv)
        pointers = (
            lse,
            parts,
            coeffs,
            q if mask is None else mask.view(torch.uint8),
            q if seed is None else seed,
        )
        direct = self.direct_back[strides]
        if direct is not None:
            launch_beside(q, direct, tensors, pointers)
            return dq, dk, dv, parts
        launch_beside(q, self.launch_back, tensors, *pointers)
        everything = tuple([x.stride() for x in tensors])
        self.direct_back[strides] = self.launch_back.direct.get(everything)
        return dq, dk, dv, parts

    def _takes(self, given: tuple[Tensor, ...], strides: tuple[Any, ...]) -> bool:
        """Whether the copy engine takes these; hooks may give saved tensors back laid out anew."""
        if strides not in self.direct_back:
            if any(copyable_by_tile(x) is not x for x in given):
                return False
            self.direct_back[strides] = None
        places = 0
        for x in given:
            places |= x.data_ptr()
        return places % 16 == 0


# False where the short kernels do not serve, or not without copies
_READY: dict[tuple[Any, ...], Ready | bool] = {}
_MOST_READY = 4096


def ready_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> Ready | None:
    """What is ready for such a call; None if it has to go the longer way."""
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return None
    signature = (
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), v.stride()),
        None if mask is None else (mask.shape, mask.stride()),
        *(dropout_p, is_causal, scale),
    )
    found = _READY.get(signature)
    if found is None:
        served = short.why_not(q, mask, scale) is None
        found = served and all(copyable_by_tile(x) is x for x in (q, k, v))
        if found:
            found = Ready(q, k, v, Options(scale, is_causal, mask, dropout_p))
        if len(_READY) >= _MOST_READY:
            # lengths that never come again
            _READY.clear()
        _READY[signature] = found
    return found if isinstance(found, Ready) else None
