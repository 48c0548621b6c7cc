"""The kernel for a decoded token in eager mode, prepared for calls that are alike.

A token takes a few microseconds on the GPU, and in each layer the same Python again. The layers of
a model decode a token by calls of one shape and layout: the first of them prepares the launch, and
the others need addresses alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gfsa.kernels.decode import Ready, decode, kept_room, ready_for, registered
from gfsa.kernels.launcher import Direct, launch_on_device_of
from gfsa.operators.base import Coefficients


class PreparedToken:
    """:func:`~gfsa.kernels.decode.decode` for tensors of one shape and layout.

    It is for plain tensors and a filter's coefficients that the kernel computes itself
    (:func:`~gfsa.kernels.decode.numbers_of`), outside of compilers.
    """

    def __init__(self, q: Tensor) -> None:
        self.heads = q.shape[0] * q.shape[1]
        self.device = q.device
        # of one GPU it needs not be asked whether it is the current one
        self.is_only_gpu = torch.cuda.device_count() <= 1
        # by the strides of u, which has free rows or none; a filter of degree 1 has no u
        self.ready: dict[tuple[int, ...] | None, tuple[Direct, Ready]] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        u: Tensor | None,
        coeffs: Coefficients,
        mask: Tensor | None,
        length: Tensor | None,
        scale: float,
        counters: Tensor | None = None,
    ) -> Tensor:
        """As :func:`~gfsa.kernels.decode.decode`."""
        layout = None if u is None else u.stride()
        found = self.ready.get(layout) or self._prepare(
            q, k, v, u, coeffs, mask, length is not None, scale
        )
        # a captured graph has room of its own
        if found is None or (found[1].sums and torch.cuda.is_current_stream_capturing()):
            return decode(q, k, v, u, coeffs, mask, length, scale, counters)
        direct, (_, numbers, count) = found
        theta, base, basis, _ = coeffs
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        u_at = v_at if u is None else u.data_ptr()
        if (q_at | k_at | v_at | u_at) % 16:
            # which copies what the kernel cannot load 16 bytes at a time
            given = (q, k, v, u, theta, base, basis, mask, length, counters)
            copied: Tensor = registered(*given, scale)
            return copied
        y = q.new_empty(q.shape)
        stream = direct.stream(self.device.index)
        sums = arrived = q_at
        if count:
            room, zeros = kept_room(count, self.heads, self.device, stream)
            sums = room.data_ptr()
            arrived = (zeros if counters is None else counters).data_ptr()
        addresses = (
            *(q_at, k_at, v_at, u_at, theta.data_ptr(), base.data_ptr(), basis.data_ptr()),
            # an address that the kernel does not read may be any
            *(
                q_at if mask is None else mask.data_ptr(),
                q_at if length is None else length.data_ptr(),
            ),
            *(y.data_ptr(), sums, arrived),
        )
        try:
            if self.is_only_gpu:
                direct.at(stream, addresses, numbers)
            else:
                launch_on_device_of(q, direct.at, stream, addresses, numbers)
        except TypeError:
            # raised before anything is launched
            return decode(q, k, v, u, coeffs, mask, length, scale, counters)
        return y

    def _prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        u: Tensor | None,
        coeffs: Coefficients,
        mask: Tensor | None,
        on_device: bool,
        scale: float,
    ) -> tuple[Direct, Ready] | None:
        """The launch for such tensors; None until its code is compiled."""
        ready = ready_for(q, k, v, u, *coeffs[:3], mask, on_device, scale)
        direct = ready.launch.direct.get(())
        if not isinstance(direct, Direct):
            return None
        self.ready[None if u is None else u.stride()] = found = (direct, ready)
        return found
