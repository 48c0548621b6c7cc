"""Hugging Face Transformers: models that look their attention function up in its registry.

A plugged attention module gets a view of its config that returns ``gfsa|sdpa`` where the config has
``sdpa``; the function registered under that name passes an operator for A to the module's filter.
The model itself and its other layers see the real config.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from gfsa.adapters.transformers.cache import (
    HeldRows,
    LayerPast,
    layer_in,
    mix_into,
    refuse_other_rows,
    source_of,
)
from gfsa.adapters.transformers.functions import (
    CHECKED,
    OperatorMaker,
    eager_function,
    eager_function_of,
    functions_of,
    is_trusted,
    operator_maker,
    refusal_by_trial,
)
from gfsa.adapters.transformers.masks import PLUGGED, ConfigView, set_mask_hooks
from gfsa.operators import AttentionOperator, DenseOperator, Operator
from gfsa.operators.call import no_autocast
from gfsa.operators.past import CachedOperator
from gfsa.plugs.adapter import CHILD, HEADS, Adapter, heads_of
from gfsa.plugs.checks.proof import (
    OTHER_SEQUENCE,
    REASON,
    name_of,
    refusal_of_call,
    require_same_tokens,
)
from gfsa.plugs.tracing.adapter import TracerAdapter
from gfsa.plugs.tracing.candidates import (
    Owners,
    computes_softmax,
    crosses_by_design,
    looks_like_attention,
    refusal_of_pooling,
    refusal_of_reduction,
)

PREFIX = "gfsa|"

# arguments of an attention module's forward that hold the tokens of another sequence
_OTHER_TOKENS = frozenset((*OTHER_SEQUENCE, "context_hidden_states"))
# those of queries and of keys where a forward takes them apart
_QUERY_AND_KEY = (("query", "key"), ("queries", "keys"), ("query_tensor", "key_tensor"), ("q", "k"))


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
        kind = type(module).__name__
        if "crossattention" in kind.lower() or getattr(module, "is_cross_attention", False) is True:
            return REASON
        if "channel" in kind.lower():
            return "its attention is over channels, not tokens"
        if refusal := refusal_of_pooling(module) or refusal_of_reduction(module):
            return refusal
        if getattr(module, "compressor", None) is not None:
            return "its keys are its tokens and compressed ones: the map is not square"
        parameters = inspect.signature(type(module).forward).parameters
        required = {name for name, one in parameters.items() if one.default is one.empty}
        if _OTHER_TOKENS & required or hasattr(module, "append_to_cache"):
            return f"{REASON} (or some of them are)"
        if not hasattr(module, "config"):
            return f"{kind} keeps no config, so its attention cannot be redirected"
        if getattr(module, "reorder_and_upcast_attn", False):
            return "reorder_and_upcast_attn computes attention outside the interface"
        heads = heads_of(module, module.config)
        implementation = module.config._attn_implementation or "eager"
        is_eager = implementation == "eager"
        registered: Any = functions_of(type(module)).get(implementation)
        function = eager_function_of(module) if is_eager else registered
        if not (heads and function) or (not is_eager and is_trusted(function)):
            return None
        return refusal_by_trial(module, function, heads, is_eager)

    def refusal_inside(self, owners: Owners) -> str | None:
        if crosses_by_design(owners):
            return REASON
        if owners and "aggregatedattention" in type(owners[0][0]).__name__.lower():
            return "its queries and keys are pooled in different ways, to different tokens"
        return None

    def install(self, module: Any) -> None:
        module.config = _ConfigView(module.config)
        module.__dict__[_ARGUMENTS] = _Arguments.of(type(module), source_of(module))
        handle = module.register_forward_pre_hook(_look_at_inputs, with_kwargs=True)
        module.__dict__[PLUGGED] = handle
        # here, because a side effect in a compiled forward would make the next call compile again
        module.__dict__["_gfsa_eager"] = eager_function(type(module))
        functions_of(type(module))
        _filtered_name(module.config.real._attn_implementation)

    def remove(self, module: Any) -> None:
        module.__dict__.pop(PLUGGED).remove()
        del module.__dict__["_gfsa_eager"], module.__dict__[_ARGUMENTS]
        module.__dict__.pop(CHECKED, None)
        module.config = module.config.real

    def on_filters_changed(self, model: nn.Module) -> None:
        views: dict[int, Any] = {}
        module: Any
        for module in model.modules():
            if PLUGGED in module.__dict__:
                # one view for all layers: a compiled call checks what it reads of it once
                module.config = views.setdefault(id(module.config.real), module.config)
        set_mask_hooks(model)
        _set_batching_entries(model)


INTERFACE = InterfaceAdapter()


class ModelTracerAdapter(TracerAdapter):
    """Traces modules of transformers outside the interface."""

    def on_filters_changed(self, model: nn.Module) -> None:
        _set_batching_entries(model)

    def wants_maps(self, module: nn.Module, given: Mapping[str, Any]) -> bool:
        if _wants_maps(module, getattr(module, "config", None), given):
            return True
        if "output_attentions" in given or torch.compiler.is_compiling():
            return False
        # neither the caller nor a recorder decides: the block around the module does (MPT)
        return _active_collector.get() is None


TRACED = ModelTracerAdapter()


def find(module: nn.Module) -> Adapter | None:
    """The adapter for ``module`` if it is a transformers attention module."""
    if _uses_interface(type(module)):
        return INTERFACE
    if not type(module).__module__.startswith("transformers."):
        return None
    inside = any(_uses_interface(type(inner)) for inner in module.modules())
    if inside or not looks_like_attention(module) or not computes_softmax(module):
        return None
    # it computes its attention outside the interface (DeBERTa-v2, GPT-Neo, Swin-V2 …)
    return TRACED


def _uses_interface(kind: type[nn.Module]) -> bool:
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


_ARGUMENTS = "_gfsa_arguments"
"""The attribute of a plugged module that holds its :class:`_Arguments`."""

_CACHE = "gfsa_cache"
"""The keyword by which the attention function gets the cache and the index of its layer."""

_CACHES = ("past_key_values", "layer_past")
# arguments that say which layer of the cache is meant, where a module serves several of them
_CACHE_INDEX = ("layer_idx", "cycle_offset")


class _Arguments(NamedTuple):
    """What the forward of a plugged module takes, and whose keys and values it uses.

    A tuple of names and numbers: with an object of another class among a module's attributes,
    torch.compile checks them all in every call.
    """

    positional: tuple[str, ...]
    # the names of queries and keys, if it takes both
    pair: tuple[str, str] | None
    # its arguments that say which layer of the cache is meant
    cache_index: tuple[str, ...]
    # how many positional arguments come before the first that the hook looks for
    others_first: int
    # as source_of the module
    source: int | None = None

    @classmethod
    def of(cls, kind: type[nn.Module], source: int | None = None) -> _Arguments:
        positional = tuple(inspect.signature(kind.forward).parameters)[1:]
        names = set(positional)
        pair = next((pair for pair in _QUERY_AND_KEY if names.issuperset(pair)), None)
        index = tuple(name for name in _CACHE_INDEX if name in names)
        wanted = _OTHER_TOKENS.union(_CACHES, index, pair or ()).intersection(names)
        others_first = min(map(positional.index, wanted), default=len(positional))
        return cls(positional, pair, index, others_first, source)


def _look_at_inputs(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before the forward of a plugged module: raise if the keys are those of another sequence."""
    arguments: _Arguments = module._gfsa_arguments
    given = kwargs
    if len(args) > arguments.others_first:
        given = {**dict(zip(arguments.positional, args, strict=False)), **kwargs}
    for name in _OTHER_TOKENS.intersection(given):
        if given[name] is not None:
            raise ValueError(refusal_of_call(module, f"it is given {name}"))
    if arguments.pair is not None:
        query, key = (given.get(name) for name in arguments.pair)
        if isinstance(query, Tensor) and isinstance(key, Tensor):
            require_same_tokens(module, query, key)
    for name in _CACHES:
        cache = given.get(name)
        if cache is not None:
            index: int | None = getattr(module, "layer_idx", None)
            if arguments.cache_index:
                index = given.get("layer_idx", index)
                index = None if index is None else index + given.get("cycle_offset", 0)
            if module.gfsa.first_values is not None:
                mix_into(cache, index, module)
            # a compiled call would check all that is read here, for every token
            if index is not None and not torch.compiler.is_compiling():
                own = getattr(cache, "self_attention_cache", cache)
                for layer in getattr(own, "layers", ())[index : index + 1]:
                    refuse_other_rows(layer)
            # transformers passes keywords on to the attention function
            return args, {**kwargs, _CACHE: (cache, index)}
    return None


_NO_BATCHING = (
    "a plugged model was called with transformers' continuous batching (generate_batch), expected "
    "a forward or generate(): beside a filter its paged cache is not supported. Save the model "
    "with save_pretrained and serve it with vLLM (docs/vllm.md), or call generate()"
)
_BATCHING = "init_continuous_batching"


def _refuse_batching(*_: Any, **__: Any) -> NoReturn:
    """In place of the method by which ``generate_batch`` and transformers' server start."""
    # an error in a forward, which runs in a thread of transformers, is in the results alone
    raise NotImplementedError(_NO_BATCHING)


def _set_batching_entries(model: nn.Module) -> None:
    """Let every model in ``model`` that has filters refuse continuous batching, and no other."""
    for module in model.modules():
        if hasattr(type(module), _BATCHING):
            module.__dict__.pop(_BATCHING, None)
            if any(CHILD in inner._modules for inner in module.modules()):
                module.__dict__[_BATCHING] = _refuse_batching


class _ConfigView(ConfigView):
    """A module's config, except that its attention implementation calls the filter."""

    @property
    def _attn_implementation(self) -> str:
        implementation = self.real._attn_implementation
        # a lookup first: every layer of every forward comes here
        return _NAMES.get(implementation) or _filtered_name(implementation)


# implementation → the name under which its filtered attention is registered
_NAMES: dict[str | None, str] = {}


def _filtered_name(implementation: str | None) -> str:
    if implementation not in _NAMES:
        name = f"{PREFIX}{implementation or 'eager'}"
        function = functools.partial(_filtered_attention, operator_maker(implementation or "eager"))
        ALL_ATTENTION_FUNCTIONS.register(name, function)
        _NAMES[implementation] = name
    return _NAMES[implementation]


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
    # by its name: versions of transformers have it in different places
    if "cache" in kwargs and type(kwargs["cache"]).__name__ == "PagedAttentionCache":
        raise NotImplementedError(_NO_BATCHING)
    # one lookup: those of a module are slow
    filter, cache = module.gfsa, kwargs.pop(_CACHE, None)
    operator, value = operator_for(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    operator = _with_past(module, operator, query.shape, value.shape[2], dropout, cache)
    weights: Tensor | None = None
    if cache is not None and filter.first_values is not None:
        # the cache holds V + r·V⁰
        operator.values_are_mixed = True
    # not by getattr: to ask whether there is a config costs a compiled call checks in each layer
    if _wants_maps(module, module.config.real, kwargs):
        y, weights = _filter_with_map(module, operator, value)
    else:
        y = filter(operator, value)
    return y.transpose(1, 2).contiguous(), weights


def _with_past(
    module: Any, operator: Operator, queries: torch.Size, keys: int, dropout: float, cache: Any
) -> Operator:
    """Give the operator the powers of past tokens, if there is a cache that keeps them."""
    new = queries[2]
    if cache is None:
        if new != keys:
            got = f"{new} queries attend to {keys} keys without a cache (a prefix, say)"
            raise ValueError(refusal_of_call(module, got))
        return operator
    # models fill a cache in training, too, but nothing is decoded from it
    if new == keys and module.training and (torch.is_grad_enabled() or dropout):
        return operator
    filter = module.gfsa
    if dropout and (filter.degree > 1 or filter.dropout_after == "filter"):
        raise ValueError(
            f"{name_of(module)} has attention dropout, which cannot be combined with a cache and "
            f"a filter of degree {filter.degree} with dropout_after="
            f"{filter.dropout_after!r}: the past was computed under another dropout mask (or "
            "is the prefix of prefix tuning, which has keys but no queries). Call model.eval(), "
            "pass use_cache=False, or let the trainer switch dropout off (TRL's GRPOConfig: "
            "disable_dropout=True); K=None decodes under dropout"
        )
    held, index = cache
    layer = layer_in(held, index, module)
    if filter.degree > 1 and not torch.compiler.is_compiling():
        layer.gfsa_rows = HeldRows(layer)
    return CachedOperator(operator, LayerPast(layer, index, new), queries[1], keys)


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
        # the collector cannot be read there; hooks record from the first call that asked for maps
        hooks = module._forward_hooks.values()
        return any(hook.__module__ == _active_collector.__module__ for hook in hooks)
    recorded = _active_collector.get()
    return bool(recorded) and any("attentions" in name for name in recorded)


def _filter_with_map(module: Any, operator: Operator, value: Tensor) -> tuple[Tensor, Tensor]:
    """The filtered tokens and the map ``H`` that a plugged module returns."""
    filter = module.gfsa
    cached = operator if isinstance(operator, CachedOperator) else None
    matrix: Operator
    if cached is None or cached.past.new == cached.keys:
        matrix = _as_matrix(operator if cached is None else cached.rows)
    elif filter.is_polynomial and filter.degree < 2:
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
    if cached is not None and filter.degree > 1:
        # for the powers that the cache keeps
        filter(cached, value)
    matrix.keeps_map, matrix.values_are_mixed = True, operator.values_are_mixed
    y = filter(matrix, value)
    return y, filter.map(matrix, value).to(value.dtype) if matrix.map is None else matrix.map


def _as_matrix(operator: Operator) -> DenseOperator:
    """The map of an operator, with the dropout of the call."""
    if isinstance(operator, AttentionOperator):
        with no_autocast(operator.call.q.device):
            return DenseOperator.from_call(operator.call)
    return operator if isinstance(operator, DenseOperator) else DenseOperator(operator.dense())


# registered at import for plugged models that are unpickled or switch their implementation
_filtered_name("sdpa")
_filtered_name("eager")
