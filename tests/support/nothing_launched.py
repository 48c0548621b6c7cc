"""Runs calls of the fused kernels on the CPU with nothing launched: only the host's part is left.

The kernels treat tokens on the CPU as those of a Hopper GPU. Everything runs except two C functions
of Triton (which encode a tensor for the copy engine, and launch) and autograd's switch to the
thread of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gfsa.operators import attention


@contextmanager
def nothing_launched() -> Iterator[None]:
    """A context in which the fused kernels take any tensors and do nothing."""
    from gfsa.kernels import decode, launching, routes, short, sweep, two_pass

    hopper = routes.Hardware(routes.HOPPER, routes.MEASURED_TRITON, None)

    def call_launch(launch: Any, tensors: Any, *pointers: Tensor, numbers: Any = None) -> None:
        if launch.direct is None:
            launch.direct = without_c_functions(launch, tensors)
        launch.direct(tensors, pointers, numbers)

    replaced: list[tuple[Any, str, Any]] = [
        (launching.Launch, "__call__", call_launch),
        (routes, "hardware_of", lambda q: hopper),
        *((module, "multiprocessors", lambda device: 132) for module in (short, sweep)),
        (decode, "_splits", lambda *call: 2),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (two_pass, "cudnn_would_run", lambda *call: False),
        (attention, "host_time_counts", lambda *tokens: not torch.compiler.is_compiling()),
    ]
    with ExitStack() as stack:
        for module, name, replacement in replaced:
            stack.enter_context(mock.patch.object(module, name, replacement))
        stack.enter_context(mock.patch.dict(attention._DECISIONS, clear=True))
        stack.enter_context(fresh_launches())
        yield


@contextmanager
def fresh_launches() -> Iterator[None]:
    """A context in which no launches are prepared yet, and after which none of it are kept."""
    from gfsa.kernels import degree_one, hopper, launching, short, sweep, two_pass

    modules = degree_one, hopper, short, sweep, two_pass
    with ExitStack() as stack:
        for each in (x for module in modules for x in vars(module).values()):
            if isinstance(each, launching.Launches):
                stack.enter_context(mock.patch.dict(each.known, clear=True))
        yield


def without_c_functions(launch: Any, tensors: Any) -> Any:
    """A direct launch whose C functions do nothing."""
    from gfsa.kernels.launching import Direct

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
