"""The models that vLLM builds for plugged checkpoints.

Most types are served by vLLM's Transformers backend, which runs transformers' own modules on vLLM's
attention. GPT-2, which that backend cannot run, is served by vLLM's own implementation. The classes
have the names of those that they extend: vLLM recognises its Transformers backend by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models import gpt2, transformers
from vllm.model_executor.models.utils import is_pp_missing_parameter

from gfsa.engines.vllm.config import FILTERS
from gfsa.engines.vllm.layers import FilteredAttention, FirstValues, ServedFilter
from gfsa.filters.spec import build
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.saving.identity import some_of


class _Filtered:
    """Mixed into a model of vLLM's Transformers backend: gives its layers their filters."""

    def _create_hf_to_vllm_mapper(self: Any) -> None:
        # names of weights depend on the architecture that wrote them
        serving = self.config.architectures
        self.config.architectures = self.config.gfsa["architectures"]
        try:
            super()._create_hf_to_vllm_mapper()  # type: ignore[misc]
        finally:
            self.config.architectures = serving

    def _create_attention_instances(self: Any, prefix: str = "") -> None:
        # prefix of an attention layer → the arguments that it was built with
        self.arguments: dict[str, dict[str, Any]] = {}
        super()._create_attention_instances(prefix)  # type: ignore[misc]
        layers = {
            name.removeprefix(f"{prefix}.").rpartition(".")[0]: arguments
            for name, arguments in self.arguments.items()
        }
        saved = getattr(self.config, FILTERS)["filters"]
        descriptions = {self._layer_of(name): description for name, description in saved.items()}
        _put_filters(self, descriptions, layers, self.model_config)
        self.arguments.clear()

    def _layer_of(self: Any, saved: str) -> str:
        """vLLM's name of a layer that the checkpoint names ``saved``."""
        # the mapper knows names of tensors, and None for those that the model ignores
        name = self.hf_to_vllm_mapper.map_name(f"{saved}.{CHILD}.theta")
        return saved if name is None else name.removesuffix(f".{CHILD}.theta")

    def _get_attn_cls(self: Any) -> Any:
        attention = super()._get_attn_cls()  # type: ignore[misc]
        if attention is MLAAttention:
            raise ValueError(
                "vLLM serves this model with multi-head latent attention, whose cache has no "
                "values of heads and no place for the powers of a filter. Set VLLM_MLA_DISABLE=1 "
                "to serve it with ordinary attention"
            )
        if attention is not Attention:
            raise ValueError(
                "this model attends in both directions: the powers of past tokens change with "
                "every new token, so they cannot be cached. Run it with gfsa.from_pretrained"
            )
        return self._build_attention

    def _build_attention(self: Any, **arguments: Any) -> Attention:
        self.arguments[arguments["prefix"]] = arguments
        return Attention(**arguments)

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights(weights)  # type: ignore[misc]
        _require_loaded(self)
        return loaded


class TransformersForCausalLM(_Filtered, transformers.TransformersForCausalLM):
    """A causal language model of transformers, with filters."""


class TransformersMoEForCausalLM(_Filtered, transformers.TransformersMoEForCausalLM):
    """A causal language model of transformers with experts, with filters."""


class GPT2LMHeadModel(gpt2.GPT2LMHeadModel):
    """vLLM's own GPT-2, with filters."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        if not config.scale_attn_weights:
            raise ValueError(
                "this GPT-2 has scale_attn_weights=False, which vLLM's GPT-2 does not support; "
                "run it with gfsa.from_pretrained"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        layers = {
            name: {
                "num_heads": module.num_heads,
                "head_size": module.head_dim,
                "scale": module.scale,
                "cache_config": vllm_config.cache_config,
                "quant_config": vllm_config.quant_config,
                "prefix": module.attn.layer_name,
            }
            for name, module in self.named_modules()
            if isinstance(module, gpt2.GPT2Attention)
        }
        # a GPT2Model that was saved without its head has no prefix
        descriptions = {
            f"transformer.{saved.removeprefix('transformer.')}": description
            for saved, description in getattr(config, FILTERS)["filters"].items()
        }
        _put_filters(self, descriptions, layers, vllm_config.model_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights(weights)
        _require_loaded(self)
        return loaded


def _put_filters(
    model: nn.Module,
    descriptions: Mapping[str, Mapping[str, Any]],
    layers: Mapping[str, Mapping[str, Any]],
    config: ModelConfig,
) -> None:
    """Let ``attn`` of each layer apply its filter, if the layer is in this process's model.

    Args:
        model: vLLM's model; under pipeline parallelism, the part of it that this process has.
        descriptions: of the filters, by layer in vLLM's model.
        layers: the names of its attention modules in the order in which they run, with the
            arguments of their attention layers.
        config: of the checkpoint.
    """
    rank, processes = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    source = config.model
    for layer, description in descriptions.items():
        if layer not in layers:
            if is_pp_missing_parameter(f"{layer}.", model):
                continue
            raise ValueError(
                f"the checkpoint has a filter for {layer}, where vLLM's model has no attention "
                f"layer; it has {some_of(layers)}"
            )
        module: Any = model.get_submodule(layer)
        arguments = layers[layer]
        count = arguments["num_heads"]
        filter = build(description, count * processes, layer, source)
        # vLLM shards heads in order: the first process has the first ones
        key_heads = arguments.get("num_kv_heads") or count
        # a process may have a copy of a head that it shares with others
        group = max(count // key_heads, count * processes // config.get_total_num_kv_heads())
        served = ServedFilter(filter, (rank * count, count), key_heads, group, layer)
        # under the name that the checkpoint has for it, where vLLM looks for its weights
        setattr(module, CHILD, served)
        further = []
        for power in range(1, filter.degree):
            # vLLM looks for one number in a layer's name: the layer's index
            prefix = f"{arguments['prefix']}.gfsa_power{power}"
            further.append(Attention(**{**arguments, "num_kv_heads": count, "prefix": prefix}))
        module.attn = FilteredAttention([module.attn, *further], served)
    _share_first_values(model, [layer for layer in layers if layer in descriptions], source)


def _share_first_values(model: nn.Module, filtered: list[str], source: str) -> None:
    """Connect layers with a depth term to the first filtered layer, whose values they add."""
    attentions = [cast(Any, model.get_submodule(layer)).attn for layer in filtered]
    deep = [attention for attention in attentions if attention.filter.r is not None]
    if not deep:
        return
    if get_pp_group().world_size > 1:
        raise ValueError(
            f"{source} has a depth term, which needs the first layer's values in every process: "
            "serve it with tensor parallelism, without pipeline parallelism"
        )
    if deep[0] is attentions[0]:
        raise ValueError(
            f"{source} has a depth term in {filtered[0]}, its first layer with a filter, where "
            "there are no earlier values to add: save the plugged model again with save_pretrained"
        )
    stack = FirstValues()
    for attention in (attentions[0], *deep):
        attention.first_values = stack
    deep[-1].is_last = True


def _require_loaded(model: nn.Module) -> None:
    """Raise if a filter has not got its numbers by the weights that were loaded so far."""
    missing = [
        module.layer
        for module in model.modules()
        if isinstance(module, ServedFilter) and not module.is_loaded
    ]
    if missing:
        raise ValueError(
            f"the checkpoint describes filters of {some_of(missing)}, but has no θ for them; save "
            "the plugged model again with save_pretrained"
        )
