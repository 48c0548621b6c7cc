"""Which operator serves a call, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa import kernels as fused
from gfsa.operators.call import AttentionCall

# not torch.nn.functional's, which may be replaced when this module is imported
TORCH_ATTENTION = torch._C._nn.scaled_dot_product_attention
Backend = Literal["auto", "dense", "sdpa", "fused"]
# torch 2.6's compiler cannot call get_args
_BACKENDS = get_args(Backend)


@dataclass(frozen=True)
class Choice:
    """The operator that serves a call, and the reason for it."""

    backend: Literal["dense", "sdpa", "fused"]
    reason: str


def choose(backend: Backend, call: AttentionCall, v: Tensor, degree: int) -> Choice:
    """The operator for a polynomial of ``degree`` on ``v``.

    A backend asked for by name runs or raises; no other runs in its place.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {_BACKENDS}, got {backend!r}")
    only_sdpa = reason_for_sdpa_alone(call)
    if only_sdpa is not None:
        return _sdpa_alone(backend, call, degree, only_sdpa)
    if backend == "dense":
        return Choice("dense", "asked for by name")
    only_dense = reason_for_dense_alone(call)
    if backend != "auto":
        refusal = only_dense
        if refusal is None and backend == "sdpa":
            refusal = refusal_by_sdpa(call, degree)
        elif refusal is None:
            refusal = refusal_by_fused(call, v, degree)
        if refusal is not None:
            raise ValueError(f"backend={backend!r} cannot serve this call: {refusal}")
        return Choice(backend, "asked for by name")
    if only_dense is not None:
        return Choice("dense", only_dense)
    not_fused = refusal_by_fused(call, v, degree)
    slower = not_fused or fused.reason_against(call.with_key_mask(), degree)
    if slower is None:
        return Choice("fused", "a fused kernel is the fastest for this call")
    refusal = refusal_by_sdpa(call, degree)
    if refusal is None:
        return Choice("sdpa", f"torch's own attention kernels, one pass a power: {slower}")
    if not_fused is None:
        return Choice("fused", f"a fused kernel covers this call, and sdpa does not: {refusal}")
    return Choice("dense", refusal)


def reason_for_sdpa_alone(call: AttentionCall) -> str | None:
    """Why torch's attention alone can compute A, or None if other operators can too."""
    if call.q.is_nested:
        return "only torch's attention knows which tokens of a nested tensor belong together"
    # context parallel replaces torch's function, so that a call with the tokens of one process
    # attends to all tokens
    if F.scaled_dot_product_attention is not TORCH_ATTENTION:
        return "torch's attention is replaced (context parallel), and only the replacement knows A"
    return None


def _sdpa_alone(backend: Backend, call: AttentionCall, degree: int, reason: str) -> Choice:
    refusal = reason_for_dense_alone(call) or refusal_by_sdpa(call, degree)
    if backend not in ("auto", "sdpa") or refusal is not None:
        raise ValueError(
            f"backend={backend!r} cannot serve this call: {reason}"
            + (f", and sdpa cannot serve it: {refusal}" if refusal else "; use 'auto' or 'sdpa'")
        )
    return Choice("sdpa", reason)


def reason_for_dense_alone(call: AttentionCall) -> str | None:
    """Why the dense operator alone can serve ``call``, or None if other operators can too."""
    if call.dropout_p and call.dropout_after == "filter":
        return "entries of H can only be dropped where H is built, by the dense operator"
    return None


def refusal_by_sdpa(call: AttentionCall, degree: int) -> str | None:
    """Why the sdpa operator cannot serve ``call``, or None if it can."""
    if call.dropout_p and degree > 1 and _generator_cannot_be_reset(call.q.device):
        return (
            "one dropout mask for all passes needs the random generator reset between them, "
            "which a compiled or captured graph cannot do; the dense operator can"
        )
    return None


def refusal_by_fused(call: AttentionCall, v: Tensor, degree: int) -> str | None:
    """Why no fused kernel can serve ``call``, or None if one can."""
    return fused.refusal(call.with_key_mask(), v, degree)


def _generator_cannot_be_reset(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
