r"""Attention of new tokens to a cache: what it holds of the past, and the rows of A for the new.

In causal attention a past token never sees a later one, so its :math:`A v, A^2 v, …` do not change
when tokens are added. A cache keeps them beside keys and values, and only the rows of new tokens
are computed:

.. math:: (A^{k+1} v)_{new} = A_{new}\,[(A^k v)_{past};\,(A^k v)_{new}]

One new token with a filter of degree 1 or 2 is a single launch where the decode kernel serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from gfsa.kernels import routes
from gfsa.kernels.routes import refusal_of_decoding
from gfsa.operators import attention
from gfsa.operators.attention import AttentionOperator
from gfsa.operators.call import AttentionCall, DecisionCache
from gfsa.operators.operator import (
    Coefficients,
    Operator,
    combine,
    own_share,
    repeat_heads,
    value_of,
)
from gfsa.operators.sdpa import SDPAOperator
from gfsa.operators.visibility import Visibility


class CachedOperator(Operator):
    """The rows of A for the newest tokens, with the cached powers of all earlier tokens.

    Args:
        rows: an operator whose ``apply`` takes all tokens and returns the new ones.
        past: what the cache holds for one attention module, such as
            :class:`gfsa.adapters.transformers.cache.LayerPast`.
        heads: query heads.
        keys: how many rows of the cache ``rows`` attends to.
        some: the query heads of ``rows``, whose powers are cached, if it has not all of them.
    """

    def __init__(
        self, rows: Operator, past: Any, heads: int, keys: int, some: tuple[int, ...] = ()
    ) -> None:
        self.rows, self.past = rows, past
        self.heads, self.keys, self.some = heads, keys, some

    def apply(self, x: Tensor) -> Tensor:
        return self.rows.apply(x)

    def polynomial(
        self, coeffs: Tensor | Coefficients, v: Tensor, exclusive: Tensor | None = None
    ) -> Tensor:
        # not by isinstance, which is slow here
        numbers: Any = coeffs.base if type(coeffs) is Coefficients else coeffs
        degree = numbers.shape[-1] - 1
        if self.keeps_map:
            self.map = self._rows_of_map(value_of(coeffs), exclusive, v).to(v.dtype)
            return self.map @ repeat_heads(v, self.map)
        if self.past.new == 1 and type(self.rows) is SDPAOperator:
            u = self.past.power(1) if degree > 1 else None
            # a filter of degree 1 needs no powers of the tokens before
            if degree == 1 or u is not None:
                y = _decode_in_one_launch(self.rows.given, self.past, u, coeffs, v, exclusive)
                if y is not None:
                    return y
        compiling = torch.compiler.is_compiling()
        if exclusive is not None:
            y = super().polynomial(coeffs, v, exclusive)
        else:
            # for one token the cost is in kernel launches, not in arithmetic
            plain = type(v) is Tensor and not torch.is_grad_enabled() and not compiling
            y = combine(value_of(coeffs), self.powers(v, degree), in_one_go=plain)
        if v.is_cuda and not compiling:
            # for the tokens after a prompt: a compiled step finds them, and cannot make them
            self.past.counters(v.shape[0] * self.heads, v.device)
        return y

    def powers(self, v: Tensor, degree: int) -> list[Tensor]:
        newest = self.past.newest(v)
        if degree == 0:
            return [newest]
        first = self.rows.apply(v)
        return [repeat_heads(newest, first), *self.further(first, degree - 1)]

    def further(self, power: Tensor, count: int) -> list[Tensor]:
        if count:
            self.past.prepare(count, self.some or tuple(range(self.heads)))
        powers = [power]
        for k in range(1, count + 1):
            powers.append(self.rows.apply(self.past.write(k, powers[-1], self.keys)))
        return powers

    def _rows_of_map(self, coeffs: Tensor, exclusive: Tensor | None, v: Tensor) -> Tensor:
        """The rows of ``H = c0·I + c1·A − diag(a·p)`` for new tokens, ``(B, H, new, keys)``."""
        rows = self.rows
        identity = torch.eye(self.keys, dtype=v.dtype, device=v.device)[None, None]
        if isinstance(rows, SDPAOperator):
            a = rows.apply(identity.expand(*rows.given.q.shape[:2], -1, -1))
        else:
            a = rows.dense()
        own = self.past.newest(identity)
        matrix = combine(coeffs, [own, a])
        if exclusive is None:
            return matrix
        tokens, mixed = self.powers(v, 1)
        return matrix - (own_share(exclusive, mixed, tokens) * own).to(matrix.dtype)

    def whole(self) -> Operator:
        return self.rows

    def visibility(self) -> Visibility | None:
        return self.rows.visibility()

    def second_pass(self, heads: Sequence[int]) -> Operator | None:
        if isinstance(self.rows, AttentionOperator):
            # in every call, since the cache keeps powers of the same heads for all tokens
            rows: Operator | None = self.rows.of_heads(heads)
        else:
            rows = self.rows.second_pass(heads)
        if rows is None:
            return None
        return CachedOperator(rows, self.past, self.heads, self.keys, tuple(heads))


# by the signature of a call: a PreparedToken, or False where torch's calls serve
_PREPARED: DecisionCache[Any] = DecisionCache()


def _decode_in_one_launch(
    call: AttentionCall, past: Any, u: Tensor | None, coeffs: Any, v: Tensor, exclusive: Any
) -> Tensor | None:
    """The filtered new token, ``(B, H, 1, D)``, by one kernel that reads the cache once.

    The kernel writes the token's power into its row of the cache. None where it does not serve;
    torch's passes then run one after another. The decision is made once for calls that are alike,
    as those of a model's layers are, unless there is an exclusive term.

    Args:
        u: ``A·v`` of the tokens before; None for a filter of degree 1.
    """
    q, length, signature = call.q, past.length_on_device, None
    if exclusive is None:
        signature = _signature(call, length is not None, u, coeffs, v)
    # nothing is kept under None
    prepared = _PREPARED.get(signature)
    if prepared is None:
        prepared = _decoder(call, u, coeffs, v, exclusive, signature is not None)
        if signature is not None:
            _PREPARED.remember(signature, prepared)
    if prepared is False:
        return None
    if u is not None:
        u = past.make_room(q)
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    counters = past.counters(q.shape[0] * q.shape[1], q.device)
    given = (q, call.k, v, u, coeffs, call.attn_mask, length, scale, counters)
    y: Tensor = prepared(*given) if exclusive is None else prepared(*given, exclusive)
    return y


def _decoder(
    call: AttentionCall, u: Tensor | None, coeffs: Any, v: Tensor, exclusive: Any, is_kept: bool
) -> Any:
    """The function that launches the kernel, prepared if it is kept; False if torch serves."""
    q = call.q
    if refusal_of_decoding(call, v, coeffs, exclusive) or call.reason_for_torch_alone():
        return False
    if u is not None and (u.shape[:2], u.shape[3], u.dtype) != (q.shape[:2], q.shape[3], q.dtype):
        return False
    # triton is imported where its kernels run
    from gfsa.kernels.decode import PreparedToken, decode, numbers_of, takes_layout

    if not takes_layout(q, call.k, v):
        return False
    if is_kept and numbers_of(coeffs, q.shape[1])[0] is not None:
        return PreparedToken(q)
    return decode


def _signature(
    call: AttentionCall, from_front: bool, u: Tensor | None, coeffs: Any, v: Tensor
) -> tuple[Any, ...] | None:
    """All that :func:`_decoder` and a launch depend on; None where no decision is kept."""
    q, k, mask, dropout_p, _, scale, _, _, _ = call
    if not attention.host_time_counts(q, k, v) or is_in_torch_dispatch_mode():
        return None
    if type(coeffs) is not Coefficients:
        return None
    # written out, because calls are slow, and every token comes here in each layer
    theta, base, basis, _ = coeffs
    return (
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype),
        *(v.shape, v.stride(), v.dtype),
        None if u is None else (u.shape, u.dtype, u.device),
        # a static window has free rows until it is full
        from_front,
        *(type(theta), theta.shape, theta.stride(), theta.dtype, theta.device),
        *(base.stride(), base.dtype, base.device, basis.shape, basis.stride(), basis.dtype),
        None if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device),
        *(dropout_p, scale, routes.DECODES_BY_KERNEL, F.scaled_dot_product_attention),
        torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad or theta.requires_grad),
    )
