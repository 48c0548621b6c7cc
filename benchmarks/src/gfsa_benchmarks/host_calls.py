"""The host's time of a call in eager mode, with nothing launched.

No GPU is needed. The tokens are on the CPU, the fused kernels treat
them as a Hopper GPU's, and everything runs except two C functions of Triton (which encode a tensor
for the copy engine, and launch) and autograd's switch to the thread of a GPU.

:mod:`gfsa_benchmarks.host_models` measures what a filter adds to a layer of a whole model.
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
    """A context in which the fused kernels take any tensors and do nothing."""
    from gfsa.kernels import decode, launcher, routes
    from gfsa.kernels.long import launch as long
    from gfsa.kernels.short import launch as short
    from gfsa.kernels.short import prepared
    from gfsa.kernels.sweep import degree_one_path as sweep_once
    from gfsa.kernels.sweep import launch as sweep

    hopper = routes.Hardware(routes.HOPPER, routes.MEASURED_TRITON, None)

    def call_launch(launch: Any, tensors: Any, *pointers: Tensor, numbers: Any = None) -> None:
        strides = tuple([x.stride() for x in tensors])
        direct = launch.direct.get(strides)
        if direct is None:
            direct = launch.direct[strides] = _without_c_functions(launch, tensors)
        direct(tensors, pointers, numbers)

    replaced: list[tuple[Any, str, Any]] = [
        (launcher.Launch, "__call__", call_launch),
        (routes, "hardware_of", lambda q: hopper),
        *((module, "multiprocessors", lambda device: 132) for module in (short, sweep, sweep_once)),
        (decode, "_splits", lambda *call: 2),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (long, "cudnn_would_run", lambda *call: False),
        (attention, "host_time_counts", lambda *tokens: not torch.compiler.is_compiling()),
    ]
    with ExitStack() as stack:
        for module, name, replacement in replaced:
            stack.enter_context(mock.patch.object(module, name, replacement))
        for cache in (attention._DECISIONS, prepared._PREPARED):
            stack.enter_context(mock.patch.dict(cache, clear=True))
        yield


def _without_c_functions(launch: Any, tensors: Any) -> Any:
    """A direct launch whose C functions do nothing."""
    from gfsa.kernels.launcher import Direct

    direct: Any = Direct.__new__(Direct)
    direct.c_launcher = lambda *arguments: None
    # a descriptor: it is kept by address, and encoded again for a new address only
    direct.encode = lambda *arguments: arguments
    direct.stream = lambda device: 0
    direct.arguments = [None] * 13
    direct.tiles = []
    for x, block in zip(tensors, launch.blocks, strict=True):
        encoding = (3, 2, 10, block, tuple(x.shape), x.stride(), 0)
        direct.tiles.append((len(direct.arguments), encoding, {}))
        direct.arguments += [None, *x.shape, *x.stride()]
    direct.constants = launch.constants
    direct.fixed = (*launch.numbers, *launch.constants)
    return direct


def microseconds(work: Callable[[], object]) -> float:
    """The least of several rounds: other load on the host only adds time."""
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
    tokens = [torch.randn(1, length, 12, 64, dtype=torch.bfloat16) for _ in range(3)]
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in tokens)
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
