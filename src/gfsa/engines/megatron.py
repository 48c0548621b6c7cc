"""Megatron-core: a core attention with a filter on its map, for layer specifications."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from gfsa.filters.spec import kind_named
from gfsa.operators import FunctionOperator
from gfsa.plugs.adapter import CHILD


def with_filters(spec: Any, filter: str = "GFSA", **arguments: Any) -> Any:
    """The same specification with a filter in every layer's self-attention.

    .. code-block:: python

        spec = with_filters(get_gpt_layer_with_transformer_engine_spec(), K=3)
        model = GPTModel(config, transformer_layer_spec=spec, …)

    Args:
        spec: of a layer, or of a block with a list of ``layer_specs``.
        filter: the name of a filter of gfsa: ``GFSA``, ``Polynomial``, ``Twicing`` …
        arguments: for the filter, such as ``K``, ``learn`` and ``power`` of :class:`gfsa.GFSA`.
    """
    kind_named(filter)
    filtered = copy.deepcopy(spec)
    layers = filtered.layer_specs if hasattr(filtered, "layer_specs") else [filtered]
    for layer in layers:
        attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
        parts: Any = getattr(attention, "submodules", None)
        if not hasattr(parts, "core_attention"):
            raise ValueError(
                f"expected a specification of layers with self_attention.core_attention, got "
                f"{layer!r:.200}"
            )
        params = {"inner": parts.core_attention, "filter": filter, "arguments": arguments}
        parts.core_attention = ModuleSpec(module=FilteredCoreAttention, params=params)
    return filtered


class FilteredCoreAttention(MegatronModule):
    r"""Core attention that returns :math:`\sum_k c_k A^k v`, one call of ``inner`` per power.

    Under tensor parallelism a process holds the rows of θ of its own heads. Inference engines of
    Megatron call kernels of their own around core attention: this is for training.

    Args:
        config: the transformer's configuration.
        inner: the core attention of the specification.
        filter, arguments: as in :func:`with_filters`.
        kwargs: for the inner core attention.
    """

    def __init__(
        self, config: Any, inner: Any, filter: str, arguments: dict[str, Any], **kwargs: Any
    ) -> None:
        super().__init__(config=config)
        dropout = kwargs.get("attention_dropout")
        if (config.attention_dropout if dropout is None else dropout) > 0:
            raise ValueError(
                f"attention_dropout={config.attention_dropout} would drop different entries of A "
                "in each of the filter's passes; set it to 0"
            )
        if config.softmax_type == "learnable":
            raise ValueError(
                "softmax_type='learnable' is not supported beside a filter: core attention would "
                "have an offset for each pass"
            )
        self.inner = inner(config=config, **kwargs)
        heads, groups = config.num_attention_heads, config.num_query_groups
        ungrouped = self.inner
        if groups != heads:
            # A·v differs between heads that share a key: further passes have a key for every head
            config = copy.copy(config)
            config.num_query_groups = heads
            ungrouped = inner(config=config, **kwargs)
        # no child: it has no parameters, and nothing of it belongs into a checkpoint
        self.__dict__["_ungrouped"] = ungrouped
        size = parallel_state.get_tensor_model_parallel_world_size()
        self.gfsa = kind_named(filter)(heads, **arguments)
        if size > 1:
            rank = parallel_state.get_tensor_model_parallel_rank()
            own = self.gfsa.keep_heads(rank, size, theta_is_cut=True)
            if self.gfsa.theta is not None:
                theta: Any = nn.Parameter(self.gfsa.theta.detach()[own].clone())
                # as Megatron marks sharded parameters
                theta.tensor_model_parallel = True
                theta.partition_dim, theta.partition_stride = 0, 1
                self.gfsa.theta = theta

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Tensor:
        """``(sequence, batch, heads·D)`` of queries ``(sequence, batch, heads, D)``."""
        if len(query) != len(key):
            raise NotImplementedError(
                f"{len(key)} keys for {len(query)} queries: a filter needs A·v of the cached "
                "tokens. Train with Megatron, serve with vLLM or transformers"
            )
        groups = query.shape[-2] // key.shape[-2]

        def attend(x: Tensor) -> Tensor:
            """``A·x`` as a call of core attention with x as values."""
            x = x.squeeze(-2)
            core, k = self.inner, key
            if groups > 1 and x.shape[-2] == query.shape[-2]:
                # A·v has a head for each query head
                core, k = self._ungrouped, key.repeat_interleave(groups, dim=-2)
            y: Tensor = core(query, k, x, attention_mask, **kwargs)
            return y.contiguous().view(*query.shape[:-1], 1, -1)

        # (…, heads, 1, D): the layout of operators, in which heads are the third axis from the end
        return self.gfsa(FunctionOperator(attend), value.unsqueeze(-2)).flatten(-3)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """The filter's tensors, θ sharded by heads, and what the inner core attention has."""
        state = {f"{CHILD}.{key}": value for key, value in self.gfsa.state_dict().items()}
        by_heads = {f"{CHILD}.theta": 0}
        sharded = make_sharded_tensors_for_checkpoint(state, prefix, by_heads, sharded_offsets)
        if hasattr(self.inner, "sharded_state_dict"):
            sharded |= self.inner.sharded_state_dict(f"{prefix}inner.", sharded_offsets, metadata)
        return sharded
