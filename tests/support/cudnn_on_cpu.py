"""cuDNN's attention on the CPU: torch's operators of that name, worked out densely.

Importing this registers them for this process. Everything is computed in float64 from what the
operators are given, logsumexp and output included, and rounded as cuDNN rounds: once, to the
tokens' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("aten", "IMPL")


def _layout(x: Tensor) -> tuple[int, ...]:
    return tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    s = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return s


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert attn_bias is None
    assert dropout_p == 0.0
    k, v = _for_each_query_head(k, q), _for_each_query_head(v, q)
    s = _scores(q, k, is_causal, scale)
    unused = torch.zeros((), dtype=torch.int64)
    out = torch.empty_like(q).copy_(s.softmax(-1) @ v.double())
    lse = s.logsumexp(-1, keepdim=True).float()
    return out, lse, unused, unused, 0, 0, unused, unused, unused


def _differentiate(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert attn_bias is None
    assert dropout_p == 0.0
    assert max_q == max_k == q.shape[2]
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.dtype == torch.float32
    # cuDNN is told the strides that a tensor of this shape has
    assert lse.stride() == torch.empty(lse.shape).stride()
    # torch keeps cuDNN's plans by the layouts of q, k and v alone, so these have to follow from q's
    assert _layout(out) == _layout(g) == _layout(torch.empty_like(q))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    given = (q, k, v)
    k, v = _for_each_query_head(k, q), _for_each_query_head(v, q)
    a = (_scores(q, k, is_causal, scale) - lse.double()).exp()
    delta = (g.double() * out.double()).sum(-1, keepdim=True)
    ds = a * (g.double() @ v.double().mT - delta) * scale
    results = (
        x.unflatten(1, (like.shape[1], -1)).sum(2)
        for x, like in zip(
            (ds @ k.double(), ds.mT @ q.double(), a.mT @ g.double()), given, strict=True
        )
    )
    dq, dk, dv = (torch.empty_like(x).copy_(y) for x, y in zip(given, results, strict=True))
    return dq, dk, dv


_LIBRARY.impl("_scaled_dot_product_cudnn_attention", _attend, "CPU")
_LIBRARY.impl("_scaled_dot_product_cudnn_attention_backward", _differentiate, "CPU")
