"""The newest token of a cached sequence by one kernel, which reads keys, values and powers once.

A filter of degree 1 has no powers to read: its cache is that of the model without filters.
Whether the kernel serves a call is decided once for calls that are alike, as those of a model's
layers are for one token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.cache_utils import DynamicLayer, StaticLayer, StaticSlidingWindowLayer

from gfsa.kernels import routes
from gfsa.kernels.routes import refusal_of_decoding
from gfsa.operators import Coefficients, attention
from gfsa.operators.call import AttentionCall, DecisionCache, Signature
from gfsa.plugs.adapters.transformers.companions import (
    STATIC,
    GrowingPowers,
    counters_beside,
    counts_its_tokens,
    has_rows_like,
    next_row,
    room_for_one,
)
from gfsa.plugs.adapters.transformers.past_check import refuse_another_past

# of the signature of a call: a PreparedToken, or False where torch's calls serve
_PREPARED: DecisionCache[Any] = DecisionCache()


def decode_in_one_launch(
    call: AttentionCall,
    layer: Any,
    owner: int,
    companion: Any,
    coeffs: Tensor | Coefficients,
    v: Tensor,
    exclusive: Tensor | None = None,
) -> Tensor | None:
    """The filtered new token, ``(B, H, 1, D)``; its power, if any, is written into the companion.

    None where the kernel does not serve; the passes are then torch's, one after another.

    Args:
        call: of the new token's query and all keys.
        layer: of the cache, after the new keys and values were added to it.
        owner: the index of the module that attends to it.
        companion: the powers ``A·v`` of the tokens before; None for a filter of degree 1.
        v: all values.
        exclusive: the share of the exclusive term.
    """
    q, k = call.q, call.k
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    from_front = type(layer) is not DynamicLayer and fills_from_the_front(layer)
    signature = None
    if exclusive is None:
        signature = _signature(call, layer, from_front, companion, coeffs, v)
    prepared = None if signature is None else _PREPARED.get(signature)
    if prepared is False:
        return None
    y: Tensor
    u: Tensor | None
    counters: Tensor | None
    if prepared is not None and companion is not None and type(layer) is DynamicLayer:
        u = next_row(companion, layer.keys.shape[2], q.device)
        if u is not None:
            y = prepared(q, k, v, u, coeffs, call.attn_mask, None, scale)
            return y
    if prepared is None:
        if not _serves(call, companion, coeffs, v, exclusive):
            if signature is not None:
                _PREPARED.remember(signature, False)
            return None
        prepared = _decoder(q, coeffs, signature)
    u = counters = None
    if companion is None:
        if type(layer) is not DynamicLayer:
            counters = counters_beside(layer, q.shape[0] * q.shape[1], q.device)
    else:
        counting = [companion] if counts_its_tokens(companion) else []
        refuse_another_past(layer, owner, counting, 1)
        u = room_for_one(companion, q, layer)
        counters = companion.counters if type(companion) in STATIC else None
    length = layer.cumulative_length if from_front else None
    given = (q, k, v, u, coeffs, call.attn_mask, length, scale, counters)
    # only what is prepared does without the exclusive term
    y = prepared(*given) if exclusive is None else prepared(*given, exclusive)
    return y


def _decoder(q: Tensor, coeffs: Tensor | Coefficients, signature: Signature | None) -> Any:
    """What launches the kernel; for a signature it is prepared, and kept."""
    # triton is imported where its kernels run
    from gfsa.kernels.decode import decode, numbers_of

    if signature is None or numbers_of(coeffs, q.shape[1])[0] is None:
        return decode
    from gfsa.kernels.decode import PreparedToken

    prepared = PreparedToken(q)
    _PREPARED.remember(signature, prepared)
    return prepared


def _signature(
    call: AttentionCall, layer: Any, from_front: bool, companion: Any, coeffs: Any, v: Tensor
) -> Signature | None:
    """All that :func:`_serves` and a launch depend on; None where no decision is kept."""
    q, k, mask, dropout_p, _, scale, _, _, _ = call
    if not attention.host_time_counts(q, k, v) or is_in_torch_dispatch_mode():
        return None
    if type(coeffs) is not Coefficients:
        return None
    # without calls, as in all of this: every token comes here in each layer
    rows: Any = None
    if companion is not None:
        rows = companion._rows if type(companion) is GrowingPowers else companion.keys
    theta, base, basis, _ = coeffs
    return (
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype),
        *(v.shape, v.stride(), v.dtype, type(layer)),
        None if rows is None else (rows.shape, rows.dtype, rows.device),
        # a static window does until it is full
        from_front,
        *(type(theta), theta.shape, theta.stride(), theta.dtype, theta.device),
        *(base.stride(), base.dtype, base.device, basis.shape, basis.stride(), basis.dtype),
        None if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device),
        *(dropout_p, scale, routes.DECODES_BY_KERNEL, F.scaled_dot_product_attention),
        torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad or theta.requires_grad),
    )


def _serves(
    call: AttentionCall,
    companion: Any,
    coeffs: Tensor | Coefficients,
    v: Tensor,
    exclusive: Tensor | None,
) -> bool:
    """Whether the kernel for a decoded token serves the call."""
    if refusal_of_decoding(call, v, coeffs, exclusive) or call.reason_for_torch_alone():
        return False
    if companion is not None and not has_rows_like(companion, call.q):
        return False
    # triton is imported where its kernels run
    from gfsa.kernels.decode import takes_layout

    return takes_layout(call.q, call.k, v)


def fills_from_the_front(layer: Any) -> bool:
    """Whether a layer has free rows after its newest tokens, as a static one has."""
    # the most common classes first, because isinstance is slow here
    kind = type(layer)
    if kind is DynamicLayer or kind is StaticLayer:
        return kind is StaticLayer
    if not isinstance(layer, StaticLayer):
        return False
    if isinstance(layer, StaticSlidingWindowLayer):
        # once the window is full it slides, and the newest tokens are the last rows
        return bool(layer.cumulative_length_int <= layer.max_cache_len)
    return True
