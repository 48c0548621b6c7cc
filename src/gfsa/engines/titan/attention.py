"""torchtitan's grouped-query attention with a filter on its map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import spmd_types as spmd
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import GQAttention
from torchtitan.tools.logging import logger

from gfsa.engines.titan.filters import FilterConfig
from gfsa.operators import Operator
from gfsa.operators.base import repeat_heads
from gfsa.plugs.adapter import names_in_forward

# the names that GQAttention's forward looked up when FilteredAttention was written
_WRITTEN_FOR = (
    "contiguous enable_gqa flatten inner_attention k_norm q_norm qkv_linear rope scaling wo"
)


class FilteredAttention(GQAttention):
    r"""Grouped-query attention that returns :math:`\sum_k c_k A^k v`, one pass a power.

    Each pass is a call of the layer's own inner attention (flex or varlen), so packed documents,
    context parallelism and tensor parallelism act on every pass as they do on the one of ordinary
    attention. Filtering inside of the inner attention would be wrong under context parallelism:
    there the keys are of the whole sequence, and A·v of the process's own part.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        gfsa: FilterConfig

    #: whether the checkpoint manager keeps the filters in exports to transformers
    is_exported = False

    def __init__(self, config: Config) -> None:
        refuse_another_forward()
        super().__init__(config)
        self.gfsa = config.gfsa.build()
        self.register_state_dict_pre_hook(_warn_of_exports)

    def forward(
        self,
        x_BLD: Tensor,
        attention_masks: Any,
        positions: Tensor | None = None,
    ) -> Tensor:
        q, k, v = self.qkv_linear(x_BLD)
        if self.q_norm is not None:
            assert self.k_norm is not None
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, positions)
        attend = partial(self.inner_attention, attention_masks=attention_masks, scale=self.scaling)
        return self.wo(self._filtered(attend, q, k, v).flatten(2))

    def _filtered(self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The filter's tokens ``(B, L, H, D)``, distributed as the queries are."""
        # the filter computes on local tensors, without types; its result has those of the queries
        with spmd.no_typecheck():
            tokens = self.gfsa(InnerAttention(attend, q, k), local(v).transpose(1, 2))
            y = distributed_as(q, tokens.transpose(1, 2).contiguous())
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
            spmd.assert_type(y, spmd.get_local_type(q), get_partition_spec(q))
        return y


def refuse_another_forward() -> None:
    """Raise if torchtitan's attention is not the one that :class:`FilteredAttention` repeats."""
    names = names_in_forward(GQAttention)
    if names != _WRITTEN_FOR:
        changed = sorted(set(names.split()) ^ set(_WRITTEN_FOR.split()))
        raise ValueError(
            f"gfsa.titan was written for torchtitan 0.3; the GQAttention of the installed version "
            f"differs in {', '.join(changed)}. Install torchtitan 0.3, or a newer gfsa"
        )


@cache
def _warn_of_exports_once() -> None:
    logger.warning(
        "the model has graph filters and the checkpoint manager is torchtitan's own: checkpoints "
        "of DCP keep the filters, an export to transformers (checkpoint.last_save_in_hf) drops "
        "them. Add gfsa.titan.checkpoint to --override.imports"
    )


def _warn_of_exports(attention: Any, *_: Any) -> None:
    """A hook of ``state_dict``, which the checkpoint manager calls."""
    if not attention.is_exported:
        _warn_of_exports_once()


class InnerAttention(Operator):
    """A of a layer of torchtitan: ``A·x`` is a call of its inner attention with x as values.

    The heads of ``x (B, heads, L, D)`` are those of the queries, or those of the keys where query
    heads share one. Queries and keys are ``(B, L, heads, D)``, and DTensors if the model's
    activations are; tokens are local tensors.
    """

    def __init__(self, attend: Callable[..., Tensor], q: Tensor, k: Tensor) -> None:
        self._attend = attend
        self._q = q
        self._k = k
        self._groups = q.shape[2] // k.shape[2]
        self._repeated_k: Tensor | None = None

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        # A·v of heads that share a key and its value differs from head to head, so the first pass
        # alone is grouped
        powers = [repeat_heads(v, local(self._q).transpose(1, 2))]
        for power in range(degree):
            powers.append(self.apply(v if power == 0 else powers[-1]))
        return powers

    def apply(self, x: Tensor) -> Tensor:
        is_grouped = x.shape[1] == local(self._k).shape[2]
        k = self._k if is_grouped else self._keys_of_every_head()
        values = distributed_as(self._q, x.transpose(1, 2).contiguous())
        y = self._attend(self._q, k, values, enable_gqa=is_grouped and self._groups > 1)
        return local(y).transpose(1, 2)

    def _keys_of_every_head(self) -> Tensor:
        if self._repeated_k is None:
            repeated = local(self._k).repeat_interleave(self._groups, dim=2)
            self._repeated_k = distributed_as(self._q, repeated)
        return self._repeated_k


def local(x: Tensor) -> Tensor:
    """What this process has of ``x``."""
    return x.to_local() if isinstance(x, DTensor) else x


def distributed_as(like: Tensor, x: Tensor) -> Tensor:
    """The local tensor ``x`` as a part of a DTensor if ``like`` is one."""
    if not isinstance(like, DTensor):
        return x
    return DTensor.from_local(x, like.device_mesh, like.placements, run_check=False)
