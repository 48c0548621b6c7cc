"""The attention maps of transformers models as operators, one function per implementation.

Each function takes what transformers passes to an attention function and returns the operator for A
together with the values in the layout that the operator expects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gfsa.operators import (
    AttentionCall,
    AttentionOperator,
    DenseOperator,
    FunctionOperator,
    Operator,
    SDPAOperator,
)
from gfsa.operators.base import repeat_heads, take_heads
from gfsa.operators.call import DropoutPlace
from gfsa.operators.sdpa import powers_with_one_mask
from gfsa.plugs.adapters.transformers.chosen_keys import (
    CHOICES,
    refuse_choice,
    with_chosen_keys,
)
from gfsa.plugs.adapters.transformers.function_lookup import (
    REGISTRIES,
    eager_function_of,
    functions_of,
)
from gfsa.plugs.adapters.transformers.masks import DescribedMask, written_out
from gfsa.plugs.adapters.transformers.paged import PagedOperator, is_paged_cache, refuse_call
from gfsa.plugs.adapters.transformers.product_check import (
    check_linear,
    check_product,
    is_trusted,
    name_of,
    needs_check,
)

OperatorMaker = Callable[..., tuple[Operator, Tensor]]

# since 5.18 transformers' sdpa raises for softcapped scores; before, it left the cap out
_REFUSES_SOFTCAP = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 18)


def operator_maker(implementation: str) -> OperatorMaker:
    """The function that returns ``(operator, value)`` for the map that ``implementation`` uses."""
    if implementation == "sdpa":
        return _sdpa_operator
    if implementation == "eager":
        return _eager_operator
    if implementation.startswith("paged|"):
        return functools.partial(_paged_operator, implementation)
    return functools.partial(_any_operator, implementation)


def _paged_operator(
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    cache: Any = None,
    block_table: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Operator, Tensor]:
    """Attention with the paged cache of continuous batching, by any of its functions."""
    refuse_call(module, implementation, cache, block_table)
    refuse_choice(name_of(module), kwargs)
    function = functions_of(type(module))[implementation]
    heads, new = query.shape[1:3]

    def attend(key: Tensor, value: Tensor, cache: Any, groups: int) -> Tensor:
        view = _ModuleView(module, groups)
        out: Tensor = function(
            view, query, key, value, attention_mask, cache=cache, block_table=None, **kwargs
        )[0]
        # flash returns no axis for the batch
        return out.reshape(1, new, heads, -1).transpose(1, 2)

    return PagedOperator(attend, module, query, key, cache), value


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
    if "cache" in kwargs and is_paged_cache(kwargs["cache"]):
        # continuous batching since transformers 5.19; before, the name is paged|sdpa
        return _paged_operator(
            *("sdpa", module, query, key, value, attention_mask),
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
            **kwargs,
        )
    if not CHOICES.isdisjoint(kwargs):
        attention_mask = with_chosen_keys(module, query, key, attention_mask, kwargs)
    if _REFUSES_SOFTCAP and kwargs.get("softcap") is not None:
        raise ValueError(
            f"{name_of(module)} caps its scores (softcap={kwargs['softcap']}), which sdpa cannot. "
            "Use model.set_attn_implementation('eager')"
        )
    registry = REGISTRIES.get(type(module))
    registered = (functions_of(type(module)) if registry is None else registry)["sdpa"]
    if registered is not sdpa_attention_forward:
        # the user registered another function under this name: it is what the model would call
        optional = {"position_bias": position_bias, "is_causal": is_causal}
        kwargs |= {name: argument for name, argument in optional.items() if argument is not None}
        mask = written_out(attention_mask)
        return _function_rows(
            *(registered, "sdpa", module, query, key, value, mask),
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
    if isinstance(attention_mask, DescribedMask):
        if position_bias is None and attention_mask.fits(query, key):
            if key.shape[2] != query.shape[2]:
                # the prompt in a static cache: the rows after it are empty
                key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            return AttentionOperator(
                *(query, key, None, dropout, False, scaling, _grouped(query, key)),
                dropout_after=_dropout_place(module, dropout),
                visible=attention_mask.visible,
            ), value
        attention_mask = attention_mask.tensor()
    return _masked_sdpa_operator(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias
    )


def _dropout_place(module: Any, dropout: float) -> DropoutPlace:
    """Where the dropout of a call acts; without dropout its place does not matter."""
    place: DropoutPlace = module.gfsa.dropout_after if dropout else "attention"
    return place


def _masked_sdpa_operator(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    bias: Tensor | None,
) -> tuple[Operator, Tensor]:
    """transformers' sdpa with a mask that is a tensor, or none."""
    new = query.shape[2]
    causal = False
    if new > 1 and mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and key.shape[2] > new:
        # the prefill of a static cache: the rows after the prompt are empty
        key, value = key[:, :, :new], value[:, :, :new]
        bias = None if bias is None else bias[..., :new]
    if bias is not None:
        mask, causal = _biased_mask(bias, mask, causal, query), False
    if new != key.shape[2]:
        call = AttentionCall(query, key, mask, dropout, False, scaling, _grouped(query, key))
        return SDPAOperator(call), value
    if mask is not None:
        mask = _one_row(mask)
        # torch's grouped-query kernels accept no mask
        key, value = repeat_heads(key, query), repeat_heads(value, query)
    operator = AttentionOperator(
        *(query, key, mask, dropout, causal, scaling, _grouped(query, key)),
        dropout_after=_dropout_place(module, dropout),
    )
    return operator, value


def _grouped(query: Tensor, key: Tensor) -> bool:
    """Whether several query heads share a key head."""
    # while torch.jit traces, sizes are tensors
    return bool(key.shape[1] != query.shape[1])


def _one_row(mask: Tensor) -> Tensor:
    """A mask that was expanded to all queries as the one row that it is: torch would copy it."""
    if mask.dim() == 4 and mask.shape[2] > 1 and mask.stride(2) == 0:
        return mask[:, :, :1]
    return mask


def _biased_mask(
    position_bias: Tensor, attention_mask: Tensor | None, causal: bool, query: Tensor
) -> Tensor:
    """A learned bias (T5) and a mask as one additive mask."""
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        return position_bias + attention_mask
    if causal:
        rows = torch.arange(query.shape[2], device=query.device)
        attention_mask = rows[:, None] >= rows[None, :]
    if attention_mask is None:
        return position_bias
    return torch.where(attention_mask, position_bias, torch.finfo(query.dtype).min)


def _eager_operator(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[Operator, Tensor]:
    """The map that the model's own eager code computes, including its dropout."""
    attention_mask = written_out(with_chosen_keys(module, query, key, attention_mask, kwargs))
    later = dropout if module.gfsa.dropout_after == "filter" else 0.0
    function = eager_function_of(module)
    if function is None:
        raise ValueError(
            f"cannot find the eager attention of {type(module).__name__}; "
            "use attn_implementation='sdpa'"
        )

    def attend(dropout: float) -> tuple[Tensor, Tensor]:
        product, weights = function(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return product, weights

    dropout = 0.0 if later else dropout
    product, weights = attend(dropout)
    if weights is None:
        raise ValueError(
            f"the eager attention of {type(module).__name__} returns no attention map; "
            "use attn_implementation='sdpa'"
        )
    if needs_check(module, function):
        check_product(module, function, attend, dropout, product, weights, value)
    if later:
        return DenseOperator(weights, later, "filter"), value
    return _EagerOperator(weights, value, product.transpose(1, 2)), value


class _EagerOperator(Operator):
    """A map computed by the model itself, together with its product with the values."""

    holds_matrix = True

    def __init__(self, weights: Tensor, value: Tensor, product: Tensor) -> None:
        self.weights = weights
        self.value = value
        self.product = product

    def apply(self, x: Tensor) -> Tensor:
        if x is self.value:
            # bit-identical to the unplugged model
            return self.product
        return self.weights.to(x.dtype) @ repeat_heads(x, self.weights)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        first, *others = super().powers(v, degree)
        return [repeat_heads(first, self.weights), *others]

    def second_pass(self, heads: Sequence[int]) -> Operator:
        return FunctionOperator(lambda x: take_heads(self.weights, heads).to(x.dtype) @ x)

    def dense(self) -> Tensor:
        return self.weights


def _any_operator(
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Operator, Tensor]:
    """Flash, flex or any other registered attention function, called once per pass."""
    if "cache" in kwargs and is_paged_cache(kwargs["cache"]):
        return _paged_operator(implementation, module, query, key, value, attention_mask, **kwargs)
    function = functions_of(type(module))[implementation]
    mask = written_out(attention_mask)
    return _function_rows(function, implementation, module, query, key, value, mask, **kwargs)


def _function_rows(
    function: Callable[..., Any],
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Operator, Tensor]:
    if module.gfsa.dropout_after == "filter" and kwargs["dropout"]:
        raise ValueError(
            f"dropout_after='filter' drops entries of H, which {implementation} never builds; "
            "use attn_implementation 'sdpa' or 'eager' for training"
        )
    if not is_trusted(function) and needs_check(module, function):
        undropped = {**kwargs, "dropout": 0.0}
        rows = _FunctionRows(function, module, query, key, attention_mask, undropped)
        check_linear(module, function, rows.apply, value)
    return _FunctionRows(function, module, query, key, attention_mask, kwargs), value


class _FunctionRows(Operator):
    """``A·x`` as one call of an attention function of transformers."""

    def __init__(
        self,
        function: Callable[..., Any],
        module: Any,
        query: Tensor,
        key: Tensor,
        attention_mask: Any,
        kwargs: dict[str, Any],
    ) -> None:
        self.function = function
        self.module = module
        self.query = query
        self.key = key
        self.attention_mask = attention_mask
        self.kwargs = kwargs

    def apply(self, x: Tensor) -> Tensor:
        key = repeat_heads(self.key, x)
        module = _ModuleView(self.module, groups=self.query.shape[1] // key.shape[1])
        out: Tensor = self.function(module, self.query, key, x, self.attention_mask, **self.kwargs)[
            0
        ]
        return out.transpose(1, 2)

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        if self.kwargs["dropout"] and degree > 1:
            tokens = powers_with_one_mask(self.apply, repeat_heads(v, self.query), degree)
        else:
            tokens = super().powers(v, degree)
        return [repeat_heads(tokens[0], self.query), *tokens[1:]]


class _ModuleView:
    """An attention module as its attention function expects it: real config, given groups."""

    def __init__(self, module: Any, groups: int) -> None:
        self._module = module
        self.config = module.config.real
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
