"""What torch's compiler writes for a GPU, without one.

A function is traced on the CPU with its gradient, and the graphs are then lowered as if all tensors
were on an H200, up to the source of the Triton kernels. What fails there fails on the GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

_DEVICE = torch.device("cuda", 0)
_H200 = {
    "multi_processor_count": 132,
    "major": 9,
    "regs_per_multiprocessor": 65_536,
    "max_threads_per_multi_processor": 2_048,
    "warp_size": 32,
}
_ANSWERS: dict[str, Callable[..., Any]] = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.get_device_capability": lambda *device: (9, 0),
    "torch.cuda.get_device_properties": lambda *device: SimpleNamespace(
        **_H200, minor=0, total_memory=2**37, name="H200", gcnArchName=""
    ),
    "torch._inductor.runtime.hints.DeviceProperties.create": lambda device: DeviceProperties(
        "cuda", 0, cc=90, **_H200
    ),
    "torch._inductor.scheduler.has_triton": lambda: True,
    "torch.utils._triton.triton_hash_with_backend": lambda: "",
}


def gpu_sources(function: Callable[..., Tensor], *inputs: Tensor) -> list[str]:
    """The code of ``function`` for a GPU, and if its result needs one that of its gradient."""
    sources: list[str] = []

    def lower(graph: GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
        sources.append(_source(graph, examples))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lower,
        bw_compiler=lower,
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    y = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    if y.requires_grad:
        y.sum().backward()
    return sources


def _source(traced: GraphModule, examples: Sequence[Tensor]) -> str:
    graph = GraphModule(traced, copy.deepcopy(traced.graph))
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": _DEVICE}
    mode = FakeTensorMode()
    with mode:
        inputs = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_DEVICE)
            for x in examples
        ]
    with ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch(name, answer))
        stack.enter_context(config.patch(compile_threads=1))
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
        lowering = GraphLowering(graph, shape_env=mode.shape_env)
        for context in (
            DebugContext(),
            V.set_graph_handler(lowering),
            V.set_fake_mode(mode),
            mode,
        ):
            stack.enter_context(context)
        lowering.run(*inputs)
        return str(lowering.codegen()[0].value)
