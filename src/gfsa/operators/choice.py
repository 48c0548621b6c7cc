"""Which operator serves a call, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.operators import fused
from gfsa.operators.dense import DropoutPlace

_TORCH_ATTENTION = F.scaled_dot_product_attention
Backend = Literal["auto", "dense", "sdpa", "fused"]


@dataclass(frozen=True)
class Choice:
    """The operator that serves a call, and the reason for it."""

    backend: Literal["dense", "sdpa", "fused"]
    reason: str


@dataclass(frozen=True)
class Call:
    """What a choice depends on: the shapes, dtypes and options of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    degree: int
    dropout_after: DropoutPlace = "attention"


def choose(backend: Backend, call: Call) -> Choice:
    """The operator for ``call``; a backend asked for by name runs or raises, nothing else runs."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")
    known_elsewhere = why_only_sdpa(call)
    if known_elsewhere is not None:
        return _only_sdpa(backend, call, known_elsewhere)
    if backend == "dense":
        return Choice("dense", "asked for by name")
    refusals = {"sdpa": why_not_sdpa, "fused": why_not_fused}
    only_dense = why_only_dense(call)
    if backend != "auto":
        refusal = only_dense or refusals[backend](call)
        if refusal is not None:
            raise ValueError(f"backend={backend!r} cannot serve this call: {refusal}")
        return Choice(backend, "asked for by name")
    if only_dense is not None:
        return Choice("dense", only_dense)
    not_fused = why_not_fused(call)
    slower = not_fused or fused.why_not_worth_it(call)
    if slower is None:
        return Choice("fused", "a fused kernel is the fastest for this call")
    refusal = why_not_sdpa(call)
    if refusal is None:
        return Choice("sdpa", f"torch's own attention kernels, one pass a power: {slower}")
    if not_fused is None:
        return Choice("fused", f"a fused kernel covers this call, and sdpa does not: {refusal}")
    return Choice("dense", refusal)


def why_only_sdpa(call: Call) -> str | None:
    """The reason why A is known to torch's attention alone, or None if it is not."""
    if call.q.is_nested:
        return "which tokens of a nested tensor belong together, torch's attention knows alone"
    # context parallel puts another function in its place, so that a call with the tokens of one
    # process attends to all tokens
    if F.scaled_dot_product_attention is not _TORCH_ATTENTION:
        return "torch's attention is replaced (context parallel), so A is known to it alone"
    return None


def _only_sdpa(backend: Backend, call: Call, reason: str) -> Choice:
    refusal = why_only_dense(call) or why_not_sdpa(call)
    if backend not in ("auto", "sdpa") or refusal is not None:
        raise ValueError(
            f"backend={backend!r} cannot serve this call: {reason}"
            + (f", and sdpa cannot serve it: {refusal}" if refusal else "; use 'auto' or 'sdpa'")
        )
    return Choice("sdpa", reason)


def why_only_dense(call: Call) -> str | None:
    """The reason why nothing but the dense operator can serve ``call``, or None if others can."""
    if call.dropout_p and call.dropout_after == "filter":
        return "entries of H can only be dropped where H is built, by the dense operator"
    return None


def why_not_sdpa(call: Call) -> str | None:
    """The reason why the sdpa operator cannot serve ``call``, or None if it can."""
    if call.dropout_p and call.degree > 1 and _generator_is_out_of_reach(call.q.device):
        return (
            "one dropout mask for all passes needs the random generator set back between them, "
            "which a compiled or captured graph cannot do; the dense operator can"
        )
    return None


def why_not_fused(call: Call) -> str | None:
    """The reason why no fused kernel can serve ``call``, or None if one can."""
    return fused.why_not(call)


def _generator_is_out_of_reach(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
