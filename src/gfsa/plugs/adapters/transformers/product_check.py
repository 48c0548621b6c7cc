r"""Check that an attention function multiplies the values by a map: by plug, and by a forward.

A filter takes the powers of the weights A that an eager function returns, so the function's product
must be :math:`A\,v`. A function that scales its output afterwards (attention sinks as a factor), or
reorders tokens in between, returns another map than the one that it used. A function that a user
registered returns no weights and is called once per power, so its output must be linear in v, with
the same map for each feature. Plug tries the function on a few random tokens; the first forward of
each layer looks again, since a function may need more than that, and the implementation can be
switched after plugging.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.base import repeat_heads
from gfsa.plugs.checks.proof import has_no_values

_CHECKED = "_gfsa_checked"

Attend = Callable[[float], tuple[Tensor, Tensor]]
"""Dropout probability → product ``(B, N, H, D)`` and weights ``(B, H, N, N)``."""


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
    """Whether a registered function is one of transformers itself, which are linear in v."""
    return str(getattr(function, "__module__", "")).startswith("transformers.")


def _reason(function: Callable[..., Any], gap: str) -> str:
    return f"its attention function {getattr(function, '__name__', repr(function))} {gap}"


def needs_check(module: Any, function: Callable[..., Any]) -> bool:
    """Whether the product of this layer's function has not been checked yet."""
    # by id: a function that a user registered may be one that cannot be pickled with the model
    return not torch.compiler.is_compiling() and module.__dict__.get(_CHECKED) != id(function)


def check_product(
    module: Any,
    function: Callable[..., Any],
    attend: Attend,
    dropout: float,
    product: Tensor,
    weights: Tensor,
    value: Tensor,
) -> None:
    """Raise unless ``product`` is ``weights @ value``, up to rounding.

    Args:
        module: the attention module, for its name and to note that it was checked.
        function: its eager attention function.
        attend: calls the function again with another dropout.
        dropout: the dropout of the call that is checked.
        product: ``(B, N, H, D)``, as the function returned it.
        weights: ``(B, H, N, N)``, as the function returned it.
        value: ``(B, H, N, D)``, or fewer heads in groups.
    """
    if product.is_meta or has_no_values(product):
        return
    with torch.no_grad():
        gap, decided = _gap(product, weights, value)
        if gap is not None and dropout:
            # the function may return the weights before their dropout
            gap, decided = _gap(*attend(0.0), value)
    _conclude(module, function, gap, decided)


def check_linear(
    module: Any,
    function: Callable[..., Any],
    apply: Callable[[Tensor], Tensor],
    value: Tensor,
) -> None:
    """Raise unless ``apply``, a registered function without dropout, multiplies by a map."""
    if value.is_meta or has_no_values(value):
        return
    with torch.no_grad():
        gap, decided = _nonlinearity(apply, value)
    _conclude(module, function, gap, decided)


def _conclude(module: Any, function: Callable[..., Any], gap: str | None, decided: bool) -> None:
    if gap is not None:
        raise ValueError(
            f"{name_of(module)} cannot be filtered with attn_implementation="
            f"{module.config.real._attn_implementation or 'eager'!r}: {_reason(function, gap)}. "
            "gfsa.unplug(model), and leave the layer out with plug(..., layers=...)"
        )
    if decided:
        module.__dict__[_CHECKED] = id(function)


def forget_check(module: Any) -> None:
    """Delete what the check has stored on a module that is unplugged."""
    module.__dict__.pop(_CHECKED, None)


def name_of(module: Any) -> str:
    """A plugged module in an error: its name in the model and its class."""
    name = module.__dict__.get("_gfsa_name")
    kind = type(module).__name__
    return f"{name} ({kind})" if name else kind


def _gap(product: Tensor, weights: Tensor, value: Tensor) -> tuple[str | None, bool]:
    """How the product differs from weights @ value, or None; and whether that was decisive."""
    product = product.transpose(1, 2)
    shape = (*product.shape[:3], value.shape[-2])
    if weights.shape != shape:
        return f"{_OTHER_MAP} (A has shape {tuple(weights.shape)}, expected {shape})", True
    value = repeat_heads(value, weights)
    expected = weights.to(value.dtype) @ value
    return _difference(product, expected, value, _OTHER_MAP)


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
