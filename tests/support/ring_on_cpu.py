"""Torch's context parallel on a CPU.

Its ring attention is written for any kernel that returns a logsumexp, but handed to the CUDA
kernels only; this passes it to the CPU's, with torch's own loops over the ring.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

_ATEN = torch.ops.aten
_OPTIONS = ("dropout_p", "is_causal")


def use_ring_on_cpu(load_balance: bool) -> None:
    """From now on, ``context_parallel`` works on CPU tensors; sums are kept in their dtype."""
    ring.custom_ops[_ATEN._scaled_dot_product_flash_attention_for_cpu.default] = _forward
    ring.custom_ops[_ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default] = _backward
    ring._cp_options.enable_load_balance = load_balance
    ring._cp_options.convert_to_f32 = False


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    mesh = args[0].device_mesh
    q, k, v = (tensor._local_tensor for tensor in args[:3])
    options = {**dict(zip(_OPTIONS, args[3:], strict=False)), **kwargs}
    results = ring._templated_ring_attention(mesh.get_group(), 2, op, q, k, v, **options)
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    mesh = args[0].device_mesh
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    tensors = {name: tensor._local_tensor for name, tensor in zip(names, args, strict=False)}
    options = {**dict(zip(_OPTIONS, args[len(names) :], strict=False)), **kwargs}
    results = ring._templated_ring_attention_backward(
        mesh.get_group(), 2, op, grad_out_name="grad_out", **tensors, **options
    )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)
