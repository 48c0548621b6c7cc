"""A filter whose heads are divided among processes (tensor parallel).

Heads do not interact inside attention, so a process needs the rows of its own heads alone. θ is
then a plain tensor of these rows, or a DTensor that is sharded along the heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def keep_heads(filter: Any, heads: slice, *, theta_is_cut: bool) -> None:
    """Let a filter compute the coefficients of some of its heads.

    Its constants are cut to these heads here; θ is the caller's to cut or to shard.

    Args:
        filter: a :class:`gfsa.GraphFilter` with all heads.
        heads: the heads of this process.
        theta_is_cut: whether θ is a plain tensor of these heads' rows. The rows of a DTensor are
            initialised from all rows, so that the initial values stay whole.
    """
    filter._exact_base = filter._exact_base[heads].clone()
    filter.base = filter.base[heads].clone()
    if filter._exact_share is not None:
        filter._exact_share = filter._exact_share[heads].clone()
        filter.base_share = filter.base_share[heads].clone()
    if theta_is_cut:
        filter._start = filter._start[heads].clone()
    filter.heads_are_sharded = True


def heads_of_process(num_heads: int, processes: int, rank: int) -> slice:
    """The heads of one process, where each has as many: the first has the first ones."""
    count = num_heads // processes
    return slice(rank * count, (rank + 1) * count)


def local_rows(theta: Any, heads_are_sharded: bool) -> Any:
    """θ as this process uses it: the rows of its heads."""
    if not hasattr(theta, "full_tensor"):
        return theta
    # sharded by heads, each process uses its own rows; sharded otherwise (outside of an FSDP
    # model's forward, say), θ is gathered
    return theta.to_local() if heads_are_sharded else theta.full_tensor()


def sharded_like(values: Tensor, theta: Tensor) -> Tensor:
    """``values``, which every process has all of, divided as ``theta`` is; nothing is sent."""
    if not hasattr(theta, "device_mesh"):
        return values
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(theta, DTensor)
    return distribute_tensor(values, theta.device_mesh, theta.placements, src_data_rank=None)
