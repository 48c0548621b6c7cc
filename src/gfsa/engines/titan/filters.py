"""Filters as modules of torchtitan, sharded by heads with the heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import spmd_types as spmd
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from gfsa.engines.kinds import kind_named
from gfsa.filters import GraphFilter
from gfsa.filters.sharding import heads_of_process, keep_heads


class TitanFilter(Module):
    """What torchtitan asks of a module, for a :class:`gfsa.GraphFilter` (a base of its class).

    Heads do not interact inside attention: under tensor parallelism each process holds the rows of
    θ that its own heads use, and the filter sends nothing.
    """

    num_heads: int
    base: Tensor
    _own_heads = slice(None)

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("tp")
        if mesh is None:
            return
        self._own_heads = heads_of_process(self.num_heads, mesh.size(), mesh.get_local_rank())
        # θ is a plain tensor of the own rows there; elsewhere a DTensor of all
        theta_is_cut = parallel_dims.spmd_backend == "spmd_types"
        keep_heads(self, self._own_heads, theta_is_cut=theta_is_cut)

    def _distribute_states(self, parallel_dims: ParallelDims) -> None:
        # base and basis are constants, which every process computes itself
        buffers = dict(self._buffers)
        self._buffers.clear()
        try:
            super()._distribute_states(parallel_dims)
        finally:
            self._buffers.update(buffers)

    def _learned(self, theta: Any) -> Any:
        if not isinstance(theta, DTensor):
            return theta
        # every process has its own part of the batch (or of the sequence), so its gradient of θ is
        # one term of a sum wherever θ itself is replicated
        gradient: list[Placement] = [
            placement if placement.is_shard() else Partial() for placement in theta.placements
        ]
        local = theta.to_local(grad_placements=gradient)
        if len(local) == len(self.base):
            return local
        # outside of a forward: fully_shard has θ in parts
        return theta.full_tensor()[self._own_heads]


@dataclass(kw_only=True, slots=True)
class FilterConfig(Module.Config):
    """Which filter an attention layer gets."""

    n_heads: int
    kind: str = "GFSA"
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # a wrong argument is refused here rather than when the model is built
        self.filter()

    def filter(self) -> GraphFilter:
        """The filter, as the library has it."""
        return kind_named(self.kind)(self.n_heads, **self.arguments)

    def build(self, **kwargs: Any) -> GraphFilter:
        """The filter as a module of torchtitan."""
        if kwargs:
            raise TypeError(f"a filter is built from its configuration alone, got {sorted(kwargs)}")
        filter = self.filter()
        kind: Any = type(filter)
        filter.__class__ = _with_protocol(kind)
        by_heads = dense_param_placement(tp=spmd.S(0))
        filter.__dict__["_sharding_config"] = ShardingConfig(state_shardings={"theta": by_heads})
        return filter


@cache
def _with_protocol(kind: Any) -> type[GraphFilter]:
    # the name and module are the filter's: checkpoints name the kind of filter by them
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (TitanFilter, kind), names)
