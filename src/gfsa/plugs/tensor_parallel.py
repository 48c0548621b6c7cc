"""Tensor parallelism: a filter's parameters are sharded by heads, with the heads."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from gfsa.filters import GraphFilter, PartialPolynomial


class ShardHeads(ParallelStyle):
    """For :func:`~torch.distributed.tensor.parallel.parallelize_module`: shard a filter by heads.

    .. code-block:: python

        parallelize_module(model.encoder.layer[0].attention, mesh, {
            "self.query": ColwiseParallel(),
            "self.key": ColwiseParallel(),
            "self.value": ColwiseParallel(),
            "self.gfsa": ShardHeads(),
            "output.dense": RowwiseParallel(),
        })

    Heads do not interact inside attention, so the filter needs no communication: each process holds
    the rows of θ (a DTensor, sharded along its heads) that its own heads use.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, GraphFilter):
            raise TypeError(f"ShardHeads is for a gfsa.GraphFilter, got {type(module).__name__}")
        size = device_mesh.size()
        if module.num_heads % size:
            raise ValueError(
                f"{module.num_heads} heads cannot be sharded evenly over {size} processes; "
                "take a number of processes that divides the heads"
            )
        if isinstance(module, PartialPolynomial):
            raise ValueError(
                "a pruned filter would give processes different work; shard the unpruned model"
            )
        module.keep_heads(device_mesh.get_local_rank(), size, theta_is_cut=False)
        theta, source = module.theta, self.src_data_rank
        if theta is not None:
            rows = distribute_tensor(theta.detach(), device_mesh, [Shard(0)], src_data_rank=source)
            module.theta = nn.Parameter(rows, requires_grad=theta.requires_grad)
        return module
