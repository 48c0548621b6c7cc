"""What the host does around the kernels: time of a call in eager mode with nothing launched.

``python -m gfsa_benchmarks.host`` needs no GPU. The tokens lie in the CPU's memory, the fused
kernels take them for a Hopper GPU's, and everything runs but two C functions of Triton, which
encode a tensor for the copy engine and launch, and autograd's change to the thread of a GPU.

What a filter adds to a layer of a whole model is in :mod:`gfsa_benchmarks.host_models`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import gfsa
from gfsa.operators import attention

REPEATS = 1000
ROUNDS = 9


@contextmanager
def nothing_launched() -> Iterator[None]:
    """Fused kernels that take any tensors and do nothing."""
    from gfsa.operators.fused import eligibility as support
    from gfsa.operators.fused import launcher as kernel
    from gfsa.operators.fused.long import launch as passes
    from gfsa.operators.fused.short import launch as short
    from gfsa.operators.fused.short import prepared as ready

    def first_call(launch: Any, tensors: Any, *pointers: Tensor) -> None:
        strides = tuple([x.stride() for x in tensors])
        known = launch.direct.get(strides)
        if known is None:
            known = launch.direct[strides] = _nowhere(kernel._Direct, launch, tensors)
        known(tensors, pointers)

    replaced: list[tuple[Any, str, Any]] = [
        (kernel.Launch, "__call__", first_call),
        (support, "_why_not_here", lambda q: None),
        (support, "capability", lambda device: (9, 0)),
        (short, "why_not_here", lambda q: None),
        (short, "multiprocessors", lambda device: 132),
        (passes, "cudnn_would_run", lambda *call: False),
        (attention, "_launches_are_short", lambda *tokens: True),
    ]
    with ExitStack() as stack:
        for place, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(place, name, stand_in))
        for remembered in (attention._CHOICES, ready._READY):
            stack.enter_context(mock.patch.dict(remembered, clear=True))
        yield


def _nowhere(direct: Any, launch: Any, tensors: Any) -> Any:
    """A direct launch whose C functions do nothing."""
    made = direct.__new__(direct)
    made.c_launcher = lambda *arguments: None
    # a descriptor, which is looked for by address before it is made again
    made.encode = lambda *arguments: arguments
    made.stream = lambda device: 0
    made.arguments = [None] * 13
    made.tiles = []
    for x, block in zip(tensors, launch.blocks, strict=True):
        about = (3, 2, 10, block, tuple(x.shape), x.stride(), 0)
        made.tiles.append((len(made.arguments), about, {}))
        made.arguments += [None, *x.shape, *x.stride()]
    made.settled = (*launch.numbers, *launch.constants)
    return made


def microseconds(work: Callable[[], object]) -> float:
    """The least of several rounds: what disturbs a host only ever adds."""
    for _ in range(50):
        work()
    return min(microseconds_of(work, REPEATS) for _ in range(ROUNDS))


def microseconds_of(work: Callable[[], object], repeats: int) -> float:
    """CPU time of this thread, the mean of ``repeats`` calls."""
    start = time.thread_time()
    for _ in range(repeats):
        work()
    return (time.thread_time() - start) / repeats * 1e6


def calls(length: int, causal: bool, mask: Tensor | None = None) -> dict[str, float]:
    """Microseconds of a call on 12 heads: without gradients, and forward with backward."""
    made = [torch.randn(1, length, 12, 64, dtype=torch.bfloat16) for _ in range(3)]
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in made)
    layer = gfsa.GFSA(12)
    coeffs = torch.rand(12, 3, requires_grad=True)
    g = torch.randn_like(q)

    def call() -> Tensor:
        return gfsa.graph_filter_attention(q, k, v, coeffs, mask, is_causal=causal)

    def filtered() -> Tensor:
        return layer(attention.AttentionOperator(q, k, mask, is_causal=causal), v)

    theta = layer.get_parameter("theta")
    return {
        "forward": microseconds(torch.no_grad()(call)),
        "forward + backward": microseconds(
            lambda: torch.autograd.grad(call(), (q, k, v, coeffs), g)
        ),
        "filter, forward + backward": microseconds(
            lambda: torch.autograd.grad(filtered(), (q, k, v, theta), g)
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    keys = torch.ones(1, 1, 1, 128, dtype=torch.bool)
    with nothing_launched():
        for name, found in (
            ("128 tokens", calls(128, False)),
            ("128 tokens, padding mask", calls(128, False, keys)),
            ("1024 tokens, causal", calls(1024, True)),
        ):
            print(f"{name:26}", *(f"{what} {time:.0f} µs;" for what, time in found.items()))
    from gfsa_benchmarks import host_models

    host_models.main()


if __name__ == "__main__":
    main()
