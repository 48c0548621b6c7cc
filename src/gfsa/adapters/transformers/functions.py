r"""The attention functions of transformers as operators, one maker per implementation.

A maker takes what transformers passes to an attention function. It returns the operator for A, and
the values in the layout that the operator expects.

A filter needs a function that multiplies the values by a map. The weights that an eager function
returns must be the map of its product: one that scales its output afterwards (attention sinks as a
factor) used another. A function that a user registered is called once per power, so it must be
linear in v. ``plug`` tries the function on a few random tokens, and the first forward of each layer
checks it again: it may need arguments that only the model has, or may have been replaced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from gfsa.adapters.transformers.masks import DescribedMask, written_out
from gfsa.operators import (
    AttentionCall,
    AttentionOperator,
    DenseOperator,
    FunctionOperator,
    Operator,
    SDPAOperator,
)
from gfsa.operators.operator import repeat_heads, take_heads
from gfsa.operators.sdpa import powers_with_one_mask
from gfsa.plugs.checks.proof import has_no_values, name_of

OperatorMaker = Callable[..., tuple[Operator, Tensor]]

# since 5.18 transformers' sdpa raises for softcapped scores; before, it left the cap out
_REFUSES_SOFTCAP = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 18)

_REGISTRIES: dict[type, AttentionInterface] = {}
"""Attention class → the registry in which it looks its function up."""


def functions_of(kind: type[nn.Module]) -> AttentionInterface:
    """The registry in which a class looks its attention function up; a model file may have one."""
    registry = _REGISTRIES.get(kind)
    if registry is None:
        if torch.compiler.is_compiling():
            return ALL_ATTENTION_FUNCTIONS
        found = inspect.unwrap(kind.forward).__globals__.get("ALL_ATTENTION_FUNCTIONS")
        registry = found if isinstance(found, AttentionInterface) else ALL_ATTENTION_FUNCTIONS
        _REGISTRIES[kind] = registry
    return registry


def eager_function_of(module: Any) -> Callable[..., Any] | None:
    """The function that a module calls for eager attention: a registered one, or its own."""
    registered: Callable[..., Any] | None = functions_of(type(module)).get("eager")
    # a plugged module knows its own
    return registered or module.__dict__.get("_gfsa_eager") or eager_function(type(module))


def eager_function(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The eager attention function that a class's forward names, from the forward's globals."""
    forward = inspect.unwrap(kind.forward)
    names = [name for name in forward.__code__.co_names if name.startswith("eager")]
    if len(names) != 1:
        return None
    return forward.__globals__.get(names[0])


def operator_maker(implementation: str) -> OperatorMaker:
    """The function that returns ``(operator, value)`` for the map that ``implementation`` uses."""
    known: dict[str, OperatorMaker] = {"sdpa": _sdpa_operator, "eager": _eager_operator}
    return known.get(implementation) or functools.partial(_any_operator, implementation)


def _sdpa_operator(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Operator, Tensor]:
    """The map of transformers' own sdpa function; gfsa chooses the kernel."""
    if _INDICES in kwargs or _BLOCKS in kwargs:
        attention_mask = _with_chosen_keys(module, query, key, attention_mask, kwargs)
    if _REFUSES_SOFTCAP and kwargs.get("softcap") is not None:
        raise ValueError(
            f"{name_of(module)} caps its scores (softcap={kwargs['softcap']}), which sdpa cannot. "
            "Use model.set_attn_implementation('eager')"
        )
    registry = _REGISTRIES.get(type(module))
    registered = (functions_of(type(module)) if registry is None else registry)["sdpa"]
    if registered is not sdpa_attention_forward:
        # a function that the user registered under this name is what the unplugged model calls
        kwargs |= {"dropout": dropout, "scaling": scaling}
        optional = {"position_bias": position_bias, "is_causal": is_causal}
        kwargs |= {name: argument for name, argument in optional.items() if argument is not None}
        return _any_operator("sdpa", module, query, key, value, attention_mask, **kwargs)
    mask, new = attention_mask, query.shape[2]
    visible = None
    if isinstance(mask, DescribedMask):
        is_read = position_bias is None and mask.fits(query, key)
        visible, mask = (mask.visible, None) if is_read else (None, mask.tensor())
    causal = False
    if new > 1 and mask is None and visible is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if (causal or visible is not None) and key.shape[2] > new:
        # the prompt in a static cache: the rows after it are empty
        key, value = key[:, :, :new], value[:, :, :new]
        position_bias = None if position_bias is None else position_bias[..., :new]
    if position_bias is not None:
        mask, causal = _biased_mask(position_bias, mask, causal, query), False
    if new != key.shape[2]:
        call = AttentionCall(query, key, mask, dropout, False, scaling, _grouped(query, key))
        return SDPAOperator(call), value
    if mask is not None:
        if mask.dim() == 4 and mask.shape[2] > 1 and mask.stride(2) == 0:
            # one row, expanded to all queries, which torch would copy
            mask = mask[:, :, :1]
        # torch's grouped-query kernels accept no mask
        key, value = repeat_heads(key, query), repeat_heads(value, query)
    operator = AttentionOperator(
        *(query, key, mask, dropout, causal, scaling, _grouped(query, key)),
        # without dropout its place does not matter
        dropout_after=module.gfsa.dropout_after if dropout else "attention",
        visible=visible,
    )
    return operator, value


def _grouped(query: Tensor, key: Tensor) -> bool:
    """Whether several query heads share a key head."""
    # while torch.jit traces, sizes are tensors
    return bool(key.shape[1] != query.shape[1])


def _biased_mask(bias: Tensor, mask: Tensor | None, causal: bool, query: Tensor) -> Tensor:
    """A learned bias (T5) and a mask as one additive mask."""
    if mask is not None and mask.dtype != torch.bool:
        return bias + mask
    if causal:
        rows = torch.arange(query.shape[2], device=query.device)
        mask = rows[:, None] >= rows[None, :]
    return bias if mask is None else torch.where(mask, bias, torch.finfo(query.dtype).min)


def _eager_operator(
    module: Any, query: Tensor, key: Tensor, value: Any, mask: Any, /, dropout: Any, **kwargs: Any
) -> tuple[Operator, Tensor]:
    """The map that the model's own eager code computes, including its dropout."""
    mask = written_out(_with_chosen_keys(module, query, key, mask, kwargs))
    later = dropout if module.gfsa.dropout_after == "filter" else 0.0
    function = eager_function_of(module)
    if function is None:
        raise ValueError(
            f"cannot find the eager attention of {type(module).__name__}; "
            "use attn_implementation='sdpa'"
        )

    def attend(dropout: float) -> Any:
        return function(module, query, key, value, mask, dropout=dropout, **kwargs)

    dropout = 0.0 if later else dropout
    product, weights = attend(dropout)
    if weights is None:
        raise ValueError(
            f"the eager attention of {type(module).__name__} returns no attention map; "
            "use attn_implementation='sdpa'"
        )
    if _needs_check(module, function, product):
        with torch.no_grad():
            found = _gap(product, weights, value)
            if found[0] is not None and dropout:
                # the function may return the weights before their dropout
                whole, kept = attend(0.0)
                found = _gap(whole, kept, value)
        _conclude(module, function, *found)
    if later:
        return DenseOperator(weights, later, "filter"), value
    return _EagerOperator(weights, value, product.transpose(1, 2)), value


@dataclass(eq=False)
class _EagerOperator(Operator):
    """A map computed by the model itself, together with its product with the values."""

    weights: Tensor
    value: Tensor
    product: Tensor

    holds_matrix = True

    def apply(self, x: Tensor) -> Tensor:
        if x is self.value:
            # bit-identical to the unplugged model
            return self.product
        return self.weights.to(x.dtype) @ repeat_heads(x, self.weights)

    def second_pass(self, heads: Sequence[int]) -> Operator:
        return FunctionOperator(lambda x: take_heads(self.weights, heads).to(x.dtype) @ x)

    def dense(self) -> Tensor:
        return self.weights


def _any_operator(
    name: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, /, **kwargs: Any
) -> tuple[Operator, Tensor]:
    """Flash, flex or any other registered attention function, called once per pass."""
    function = functions_of(type(module))[name]
    mask, dropout = written_out(mask), kwargs.pop("dropout")
    if module.gfsa.dropout_after == "filter" and dropout:
        raise ValueError(
            f"dropout_after='filter' drops entries of H, which {name} never builds; "
            "use attn_implementation 'sdpa' or 'eager' for training"
        )

    def attend(x: Tensor, dropout: float = dropout) -> Tensor:
        k = repeat_heads(key, x)
        view = _ModuleView(module, groups=query.shape[1] // k.shape[1])
        y: Tensor = function(view, query, k, x, mask, dropout=dropout, **kwargs)[0]
        return y.transpose(1, 2)

    if not is_trusted(function) and _needs_check(module, function, value):
        with torch.no_grad():
            _conclude(module, function, *_nonlinearity(lambda x: attend(x, 0.0), value))
    return (_DroppingRows(attend, query) if dropout else FunctionOperator(attend)), value


class _DroppingRows(FunctionOperator):
    """``A·x`` by a function that drops entries of A: the same in every pass."""

    def __init__(self, apply: Callable[[Tensor], Tensor], query: Tensor) -> None:
        super().__init__(apply)
        self.query = query

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        if degree > 1:
            return powers_with_one_mask(self.apply, repeat_heads(v, self.query), degree)
        return super().powers(v, degree)


class _ModuleView:
    """An attention module as its attention function expects it: real config, given groups."""

    def __init__(self, module: Any, groups: int) -> None:
        self._module = module
        self.config = module.config.real
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# the arguments by which a module passes on the keys that its indexer has chosen
_INDICES, _BLOCKS = "indices", "block_indices"


def _with_chosen_keys(
    module: Any, query: Tensor, key: Tensor, attention_mask: Any, kwargs: dict[str, Any]
) -> Any:
    """The mask with the keys that an indexer chose (DeepSeek-V3.2, MiniMax-M3).

    Such a module adds the choice to the mask for ``eager`` and ``sdpa``. For the implementation of
    a plugged module it passes the indices on, which are removed from ``kwargs`` here.
    """
    indices, blocks = kwargs.pop(_INDICES, None), kwargs.pop(_BLOCKS, None)
    keys = key.shape[2]
    if blocks is not None:
        positions = kwargs.get("position_ids")
        if positions is None:
            # the queries are the last tokens
            positions = torch.arange(keys - query.shape[2], keys, device=query.device)
        positions = torch.atleast_2d(positions).expand(query.shape[0], -1)
        build = module.indexer.build_block_mask
        return build(blocks, attention_mask, keys, query.dtype, query.device, positions)
    if indices is None:
        return attention_mask
    # (B, 1, N, T), True where the indexer has not chosen a key
    left_out = indices.new_ones((*indices.shape[:2], keys), dtype=torch.bool)
    left_out = left_out.scatter(-1, indices.long(), False)[:, None]
    if attention_mask is None:
        raise ValueError(
            f"{type(module).__name__} chooses keys by an indexer, but passes no mask on; expected "
            "one that hides later tokens and padding. Leave it out with plug(..., layers=...)"
        )
    # a described mask is a bool one, and & writes it out
    if attention_mask.dtype == torch.bool:
        return attention_mask & ~left_out
    return attention_mask.masked_fill(left_out, torch.finfo(query.dtype).min)


CHECKED = "_gfsa_checked"
"""The attribute of a plugged module that says which function was checked."""


def refusal_by_trial(
    module: Any, function: Callable[..., Any], heads: int, is_eager: bool
) -> str | None:
    """Why a function's map cannot be filtered, or None if a trial does not show it."""
    weight = next(module.parameters(), None)
    if weight is None or weight.is_meta or not weight.is_floating_point():
        return None
    dim, groups = getattr(module, "head_dim", None), getattr(module, "num_key_value_groups", 1)
    if not isinstance(dim, int) or not isinstance(groups, int) or heads % groups:
        return None
    # a generator of its own: plug must not change what the model draws next
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, count, 4, dim, generator=generator).to(weight)
        for count in (heads, heads // groups, heads // groups)
    )
    mask = torch.zeros(1, 1, 4, 4).to(weight)

    def attend(x: Tensor) -> Any:
        return function(module, query, key, x, mask, dropout=0.0, scaling=dim**-0.5)

    try:
        with torch.no_grad():
            if is_eager:
                product, weights = attend(value)
                gap, _ = _gap(product, weights, value)
            else:
                gap, _ = _nonlinearity(lambda x: attend(x)[0].transpose(1, 2), value)
    except Exception:
        # it needs arguments that only the model passes, so a forward has to show it
        return None
    return None if gap is None else _reason(function, gap)


def is_trusted(function: Callable[..., Any]) -> bool:
    """Whether a function is one of transformers itself, which are linear in v."""
    return str(getattr(function, "__module__", "")).startswith("transformers.")


def _reason(function: Callable[..., Any], gap: str) -> str:
    return f"its attention function {getattr(function, '__name__', repr(function))} {gap}"


def _needs_check(module: Any, function: Callable[..., Any], x: Tensor) -> bool:
    """Whether this layer's function has not been checked yet, and ``x`` can be read."""
    # by id: a function that a user registered may be one that cannot be pickled with the model
    if torch.compiler.is_compiling() or module.__dict__.get(CHECKED) == id(function):
        return False
    return not (x.is_meta or has_no_values(x))


def _conclude(module: Any, function: Callable[..., Any], gap: str | None, decided: bool) -> None:
    if gap is not None:
        raise ValueError(
            f"{name_of(module)} cannot be filtered with attn_implementation="
            f"{module.config.real._attn_implementation or 'eager'!r}: {_reason(function, gap)}. "
            "gfsa.unplug(model), and leave the layer out with plug(..., layers=...)"
        )
    if decided:
        module.__dict__[CHECKED] = id(function)


def _gap(product: Tensor, weights: Tensor, value: Tensor) -> tuple[str | None, bool]:
    """How the product differs from weights @ value, or None; and whether that was decisive."""
    product = product.transpose(1, 2)
    shape = (*product.shape[:3], value.shape[-2])
    if weights.shape != shape:
        return f"{_OTHER_MAP} (A has shape {tuple(weights.shape)}, expected {shape})", True
    value = repeat_heads(value, weights)
    return _difference(product, weights.to(value.dtype) @ value, value, _OTHER_MAP)


def _nonlinearity(apply: Callable[[Tensor], Tensor], value: Tensor) -> tuple[str | None, bool]:
    """How a function of the values differs from a product with a map, as in :func:`_gap`."""
    # other values for each token, of other features: A·(v - 2·w) = A·v - 2·A·w
    other = value.flip(-2)
    together = value - 2 * other.roll(1, -1)
    product = apply(together)
    expected = apply(value) - 2 * apply(other).roll(1, -1)
    return _difference(product, expected, repeat_heads(together, product), _NOT_LINEAR)


_OTHER_MAP = (
    "returns weights A that are not what it multiplied with the values, so their powers are those "
    "of another map"
)
_NOT_LINEAR = "is not linear in the values: it multiplies them by no map that has powers"


def _difference(
    product: Tensor, expected: Tensor, value: Tensor, fault: str
) -> tuple[str | None, bool]:
    difference = (product - expected).abs().float()
    scale = value.abs().amax(-2, keepdim=True).float()
    # rows that see no key are NaN, and so are all rows of a diverged model: neither is compared
    known = difference.isfinite() & scale.isfinite()
    off = known & (difference > _TOLERANCE.get(product.dtype, 1e-2) * scale)
    if bool(off.any()):
        worst = torch.where(off, difference / scale, 0.0).max().item()
        return f"{fault} (by up to {worst:.2g} of the largest value)", True
    # one token, or values of zero, look the same under any map
    return None, value.shape[-2] > 1 and bool((known & (scale > 0)).any())


# both products are rounded in their dtype, and summed in another order
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
