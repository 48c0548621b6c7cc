r"""Check, once for each layer, that an eager attention function multiplied what it returns.

A filter takes the powers of the returned weights A, so the function's product must be
:math:`A\,v`. A function that scales its output afterwards (attention sinks as a factor), or
reorders tokens in between, returns another map than the one that it used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gfsa.operators.dense import repeat_heads
from gfsa.plugs.cross_attention import has_no_values

_CHECKED = "_gfsa_checked"

Attend = Callable[[float], tuple[Tensor, Tensor]]
"""Dropout probability → product ``(B, N, H, D)`` and weights ``(B, H, N, N)``."""


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
            f"{module.config.real._attn_implementation or 'eager'!r}: its attention function "
            f"{function.__name__} returns weights A that are not what it multiplied with the "
            f"values ({gap}), so their powers are those of another map. "
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
    # rows that see no key are NaN, and a diverged model is not to be blamed here
    known = difference.isfinite() & scale.isfinite()
    off = known & (difference > _TOLERANCE.get(product.dtype, 1e-2) * scale)
    if bool(off.any()):
        worst = torch.where(off, difference / scale, 0.0).max().item()
        return f"the product differs from A·v by up to {worst:.2g} of the largest value", True
    # one token, or values of zero, look the same under any map
    return None, shape[-1] > 1 and bool((known & (scale > 0)).any())


# both products are rounded in their dtype, and summed in another order
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
