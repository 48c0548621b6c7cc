r"""Check that an eager attention function multiplied what it returns: by plug, and by a forward.

A filter takes the powers of the returned weights A, so the function's product must be
:math:`A\,v`. A function that scales its output afterwards (attention sinks as a factor), or
reorders tokens in between, returns another map than the one that it used. Plug tries the function
on a few random tokens; the first forward of each layer looks again, since a function may need more
than that, and the implementation can be switched after plugging.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.base import repeat_heads
from gfsa.plugs.cross_attention import has_no_values

_CHECKED = "_gfsa_checked"

Attend = Callable[[float], tuple[Tensor, Tensor]]
"""Dropout probability → product ``(B, N, H, D)`` and weights ``(B, H, N, N)``."""


def refusal_by_trial(module: Any, function: Callable[..., Any], heads: int) -> str | None:
    """Why an eager function's weights cannot be filtered, or None if a trial does not show it."""
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
    try:
        with torch.no_grad():
            product, weights = function(
                module, query, key, value, mask, dropout=0.0, scaling=dim**-0.5
            )
            gap, _ = _gap(product, weights, value)
    except Exception:
        # it needs arguments that only the model passes, so a forward has to show it
        return None
    return None if gap is None else _reason(function, gap)


def _reason(function: Callable[..., Any], gap: str) -> str:
    return (
        f"its attention function {function.__name__} returns weights A that are not what it "
        f"multiplied with the values ({gap}), so their powers are those of another map"
    )


def needs_check(module: Any, function: Callable[..., Any]) -> bool:
    """Whether the product of this layer's eager function has not been checked yet."""
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
        return f"A has shape {tuple(weights.shape)}, expected {shape}", True
    value = repeat_heads(value, weights)
    expected = weights.to(value.dtype) @ value
    difference = (product - expected).abs().float()
    scale = value.abs().amax(-2, keepdim=True).float()
    # rows that see no key are NaN, and so are all rows of a diverged model: neither is compared
    known = difference.isfinite() & scale.isfinite()
    off = known & (difference > _TOLERANCE.get(product.dtype, 1e-2) * scale)
    if bool(off.any()):
        worst = torch.where(off, difference / scale, 0.0).max().item()
        return f"the product differs from A·v by up to {worst:.2g} of the largest value", True
    # one token, or values of zero, look the same under any map
    return None, shape[-1] > 1 and bool((known & (scale > 0)).any())


# both products are rounded in their dtype, and summed in another order
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
