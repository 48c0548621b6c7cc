"""Hugging Face Transformers: models that look their attention function up in its registry.

Such a model looks up ``config._attn_implementation``. A plugged attention module gets a view of its
config that returns ``gfsa|sdpa`` where the config has ``sdpa``; the function registered under that
name passes an operator for A to the module's filter. The model itself and its other layers see the
real config, so the implementation can still be switched; for its masks see ``mask_hooks.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from gfsa.operators import AttentionOperator, Coefficients, DenseOperator, Operator
from gfsa.operators.base import repeat_heads, value_of
from gfsa.operators.call import no_autocast
from gfsa.plugs.adapter import HEADS, Adapter, heads_of
from gfsa.plugs.adapters.transformers.cache import CachedOperator, layer_in
from gfsa.plugs.adapters.transformers.config_view import ConfigView
from gfsa.plugs.adapters.transformers.continuous_batching import enter_where_plugged
from gfsa.plugs.adapters.transformers.function_lookup import (
    eager_function,
    eager_function_of,
    functions_of,
)
from gfsa.plugs.adapters.transformers.inputs import (
    ARGUMENTS,
    CACHE,
    Arguments,
    look_at_inputs,
)
from gfsa.plugs.adapters.transformers.mask_hooks import set_mask_hooks
from gfsa.plugs.adapters.transformers.operators import OperatorMaker, operator_maker
from gfsa.plugs.adapters.transformers.past_check import remember_rows
from gfsa.plugs.adapters.transformers.product_check import (
    forget_check,
    is_trusted,
    name_of,
    refusal_by_trial,
)
from gfsa.plugs.adapters.transformers.refusals import (
    refusal_by_owner,
    refusal_of_interface,
    refusal_of_traced,
)
from gfsa.plugs.adapters.transformers.renamed_layers import renamings_of
from gfsa.plugs.cross_attention import REASON, Owners, crosses_by_design
from gfsa.plugs.saving.identity import kind_of_layer
from gfsa.plugs.saving.renames import Renaming
from gfsa.plugs.tracing.adapter import TracerAdapter
from gfsa.plugs.tracing.candidates import computes_softmax, looks_like_attention

PREFIX = "gfsa|"


class InterfaceAdapter(Adapter):
    """Plugs attention modules that use transformers' attention interface."""

    how = "attention interface"

    def num_heads(self, module: Any) -> int:
        heads = heads_of(module, module.config)
        if heads is not None:
            return heads
        raise ValueError(
            f"cannot tell how many heads {type(module).__name__} has: neither it nor its config "
            f"has one of {', '.join(HEADS)}; gfsa.register_adapter an adapter for this class"
        )

    def refusal(self, name: str, module: Any) -> str | None:
        refusal = refusal_of_interface(module)
        if refusal is not None:
            return refusal
        if not hasattr(module, "config"):
            return f"{type(module).__name__} keeps no config, so its attention cannot be redirected"
        if getattr(module, "reorder_and_upcast_attn", False):
            return "reorder_and_upcast_attn computes attention outside the interface"
        heads = heads_of(module, module.config)
        implementation = module.config._attn_implementation or "eager"
        is_eager = implementation == "eager"
        function: Any = eager_function_of(module)
        if not is_eager:
            function = functions_of(type(module)).get(implementation)
        if not (heads and function) or (not is_eager and is_trusted(function)):
            return None
        return refusal_by_trial(module, function, heads, is_eager)

    def refusal_inside(self, owners: Owners) -> str | None:
        if crosses_by_design(owners):
            return REASON
        return refusal_by_owner(owners[0][0]) if owners else None

    def renamings(self, module: nn.Module) -> Sequence[Renaming]:
        return renamings_of(kind_of_layer(module))

    def install(self, module: Any) -> None:
        module.config = _ConfigView(module.config)
        module.__dict__[ARGUMENTS] = Arguments.of(type(module))
        handle = module.register_forward_pre_hook(look_at_inputs, with_kwargs=True)
        module.__dict__["_gfsa_handle"] = handle
        # looked up and registered here, not in a forward that may be compiled: a side effect in a
        # compiled call would make the next call compile again
        module.__dict__["_gfsa_eager"] = eager_function(type(module))
        functions_of(type(module))
        _filtered_name(module.config.real._attn_implementation)

    def remove(self, module: Any) -> None:
        module.__dict__.pop("_gfsa_handle").remove()
        del module.__dict__["_gfsa_eager"], module.__dict__[ARGUMENTS]
        module.__dict__.pop("_gfsa_name", None)
        forget_check(module)
        module.config = module.config.real

    def mark(self, model: nn.Module) -> None:
        views: dict[int, Any] = {}
        module: Any
        for name, module in model.named_modules():
            if "_gfsa_handle" in module.__dict__:
                module.__dict__["_gfsa_name"] = name
                # one view for all layers, as they have one config: a compiled call checks what it
                # reads of it once, not once a layer
                module.config = views.setdefault(id(module.config.real), module.config)
        set_mask_hooks(model)
        enter_where_plugged(model)


INTERFACE = InterfaceAdapter()


class ModelTracerAdapter(TracerAdapter):
    """Traces modules of transformers outside the interface, except where there is no map."""

    def refusal(self, name: str, module: nn.Module) -> str | None:
        return refusal_of_traced(module) or super().refusal(name, module)

    def mark(self, model: nn.Module) -> None:
        super().mark(model)
        enter_where_plugged(model)

    def wants_maps(self, module: nn.Module, given: Mapping[str, Any]) -> bool:
        if _wants_maps(module, getattr(module, "config", None), given):
            return True
        if "output_attentions" in given or torch.compiler.is_compiling():
            return False
        # neither the caller nor a recorder decides: the block around the module does (MPT)
        return _active_collector.get() is None


TRACED = ModelTracerAdapter()


def find(module: nn.Module) -> Adapter | None:
    """The adapter for ``module`` if it is a transformers attention module.

    Classes that compute their attention outside the interface (DeBERTa-v2, GPT-Neo, Swin-V2 …)
    are traced.
    """
    if _uses_interface(type(module)):
        return INTERFACE
    if not type(module).__module__.startswith("transformers."):
        return None
    inside = any(_uses_interface(type(inner)) for inner in module.modules())
    if inside or not looks_like_attention(module) or not computes_softmax(module):
        return None
    return TRACED


def _uses_interface(kind: type[nn.Module]) -> bool:
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


class _ConfigView(ConfigView):
    """A module's config, except that its attention implementation calls the filter."""

    @property
    def _attn_implementation(self) -> str:
        implementation = self.real._attn_implementation
        # as _filtered_name does: every layer of every forward comes here
        return _NAMES.get(implementation) or _register(implementation)


# implementation → the name under which its filtered attention is registered; a dict because every
# layer looks it up in every forward
_NAMES: dict[str | None, str] = {}


def _filtered_name(implementation: str | None) -> str:
    return _NAMES.get(implementation) or _register(implementation)


def _register(implementation: str | None) -> str:
    name = f"{PREFIX}{implementation or 'eager'}"
    function = functools.partial(_filtered_attention, operator_maker(implementation or "eager"))
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    _NAMES[implementation] = name
    return name


def _filtered_attention(
    operator_for: OperatorMaker,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that a plugged module calls in place of the implementation's own."""
    cache = kwargs.pop(CACHE, None)
    operator, value = operator_for(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    operator = _with_past(module, operator, query, value, dropout, cache)
    weights: Tensor | None = None
    if cache is not None and module.gfsa.first_values is not None:
        # the cache holds V + r·V⁰
        operator.values_are_mixed = True
    # not by getattr: to ask whether there is a config costs a compiled call checks in each layer
    if _wants_maps(module, module.config.real, kwargs):
        y, weights = _filter_with_map(module, operator, value)
    else:
        y = module.gfsa(operator, value)
    return y.transpose(1, 2).contiguous(), weights


def _with_past(
    module: Any, operator: Operator, query: Tensor, value: Tensor, dropout: float, cache: Any
) -> Operator:
    """Give the operator the powers of past tokens, if there is a cache that keeps them."""
    new, keys = query.shape[2], value.shape[2]
    if cache is None:
        if new != keys:
            raise ValueError(
                f"{new} queries of {name_of(module)} attend to {keys} keys without a "
                "cache: that is cross-attention or a prefix, which has no powers. Leave it out "
                "with plug(..., layers=...)"
            )
        return operator
    # models fill a cache in training, too, but nothing is decoded from it
    if new == keys and module.training and (torch.is_grad_enabled() or dropout):
        return operator
    if dropout and (_needs_powers(module.gfsa) or module.gfsa.dropout_after == "filter"):
        raise ValueError(
            f"{name_of(module)} has attention dropout, which cannot be combined with a cache and "
            f"a filter of degree {module.gfsa.degree} with dropout_after="
            f"{module.gfsa.dropout_after!r}: the past was computed under another dropout mask (or "
            "is the prefix of prefix tuning, which has keys but no queries). Call model.eval(), "
            "pass use_cache=False, or let the trainer switch dropout off (TRL's GRPOConfig: "
            "disable_dropout=True); K=None decodes under dropout"
        )
    held, index = cache
    layer = layer_in(held, index, module)
    if not torch.compiler.is_compiling() and _needs_powers(module.gfsa):
        remember_rows(layer)
    return CachedOperator(operator, layer, index, new, query.shape[1], keys)


def _wants_maps(module: Any, config: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller asked for attention maps: by keyword, by config, or by a recorder."""
    if kwargs.get("output_attentions"):
        return True
    compiling = torch.compiler.is_compiling()
    known: dict[str, Any] = {}
    if not compiling and isinstance(config, PreTrainedConfig):
        # without the config's own lookup, which is slow: the attribute behind the property
        known = object.__getattribute__(config, "__dict__")
    if "_output_attentions" in known:
        if known["_output_attentions"]:
            return True
    elif getattr(config, "output_attentions", False):
        return True
    if compiling:
        # the collector cannot be read while a graph is traced; transformers' recording hooks are
        # installed from the first call that asked for maps
        hooks = module._forward_hooks.values()
        return any(hook.__module__ == _active_collector.__module__ for hook in hooks)
    recorded = _active_collector.get()
    return bool(recorded) and any("attentions" in name for name in recorded)


def _filter_with_map(module: Any, operator: Operator, value: Tensor) -> tuple[Tensor, Tensor]:
    """The filtered tokens and the map ``H`` that a plugged module returns."""
    filter = module.gfsa
    cached = operator if isinstance(operator, CachedOperator) else None
    matrix: Any
    if cached is None or cached.new == cached.keys:
        matrix = _as_matrix(operator if cached is None else cached.rows)
    elif filter.is_polynomial and not _needs_powers(filter):
        matrix = cached
    else:
        raise ValueError(
            f"output_attentions is not supported while {name_of(module)} decodes with a cache and "
            f"a {type(filter).__name__} of degree {filter.degree}: the rows of H need the whole "
            "map of the past, which the cache does not keep. Pass use_cache=False, or plug with "
            "K=None, whose H = w0·I + w1·A needs none of it"
        )
    if not filter.is_polynomial:
        # a baseline adds what is no part of its map
        return filter(operator, value), filter.map(matrix).to(value.dtype)
    if cached is not None and _needs_powers(filter):
        # for the powers that the cache keeps
        filter(cached, value)
    keeper = _MapKeeper(matrix)
    keeper.values_are_mixed = operator.values_are_mixed
    y = filter(keeper, value)
    return y, filter.map(matrix, value).to(value.dtype) if keeper.map is None else keeper.map


class _MapKeeper(Operator):
    """Multiplies tokens by ``H`` and keeps it, so that gradients flow through the returned map.

    Args:
        matrix: a :class:`DenseOperator`, or a :class:`CachedOperator` with the rows of new tokens.
    """

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix
        self.map: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        y: Tensor = self.matrix.apply(x)
        return y

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        powers: list[Tensor] = self.matrix.powers(v, degree)
        return powers

    def polynomial(
        self, coeffs: Tensor | Coefficients, v: Tensor, exclusive: Tensor | None = None
    ) -> Tensor:
        self.map = self.matrix.filter(value_of(coeffs), exclusive, v).to(v.dtype)
        dropout_p = self.matrix.dropout_p
        dropped = F.dropout(self.map, dropout_p) if dropout_p else self.map
        return dropped @ repeat_heads(v, self.map)


def _as_matrix(operator: Operator) -> DenseOperator:
    """The map of an operator, with the dropout of the call."""
    if isinstance(operator, DenseOperator):
        return operator
    if isinstance(operator, AttentionOperator):
        with no_autocast(operator.call.q.device):
            return DenseOperator.from_call(operator.call)
    return DenseOperator(operator.dense())


def _needs_powers(filter: Any) -> bool:
    """Whether the filter of a new token needs more of the past than its keys and values."""
    needs: bool = filter.degree > 1
    return needs


# registered at import for plugged models that are unpickled or switch their implementation
for _implementation in ("sdpa", "eager"):
    _register(_implementation)
