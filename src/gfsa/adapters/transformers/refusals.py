"""Attention classes of transformers without a square map over their own tokens.

That is decided from a module's class, signature and settings, so that the report of ``plug`` has
the reason before any forward runs.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from gfsa.plugs.adapter import NAME
from gfsa.plugs.checks.proof import OTHER_SEQUENCE, REASON
from gfsa.plugs.tracing.candidates import refusal_of_pooling

OTHER_TOKENS = frozenset((*OTHER_SEQUENCE, "context_hidden_states"))
"""Arguments of an attention module's forward that hold the tokens of another sequence."""

QUERY_AND_KEY = (("query", "key"), ("queries", "keys"), ("query_tensor", "key_tensor"), ("q", "k"))
"""Arguments that hold the tokens of queries and of keys where a forward takes them apart."""

REDUCED = "its keys are a shorter summary of its tokens: the map is not square"

# class names of attention outside the interface; the tracer has a table for those of any library
_WITHOUT_MAP = {
    r"gemma\d\w*audio|^localselfattention$": "its map is kept in bands or blocks, not as a square",
    r"nystrom": "its map is a product of three maps to and from landmarks",
    r"lilt": "its text and its layout attend with a map each",
    r"sequencecompressor": REASON,
    r"invariantpoint": "one map multiplies values, points and pairs",
}


def refusal_of_interface(module: Any) -> str | None:
    """Why a module that uses the attention interface cannot be filtered, or None."""
    kind = type(module).__name__.lower()
    if "crossattention" in kind or getattr(module, "is_cross_attention", False) is True:
        return REASON
    if (pooling := refusal_of_pooling(module)) is not None:
        return pooling
    if "channel" in kind:
        return "its attention is over channels, not tokens"
    if hasattr(module, "sequence_reduction"):
        return REDUCED
    if getattr(module, "query_stride", None):
        return "its queries are pooled: the map is not square"
    if getattr(module, "compressor", None) is not None:
        return "its keys are its tokens and compressed ones: the map is not square"
    required = {
        name
        for name, parameter in inspect.signature(type(module).forward).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    if OTHER_TOKENS & required or hasattr(module, "append_to_cache"):
        return f"{REASON} (or some of them are)"
    return None


def refusal_of_traced(module: Any) -> str | None:
    """Why a module outside the interface cannot be filtered by tracing, or None."""
    kind = type(module).__name__
    for pattern, why in _WITHOUT_MAP.items():
        if re.search(pattern, kind.lower()):
            return why
    if kind == "PvtV2SelfAttention" and module.linear_attention:
        return REDUCED
    if kind == "CvtSelfAttention" and _strides(module.convolution_projection_key):
        return REDUCED
    return None


def _strides(projection: nn.Module) -> bool:
    """Whether a projection by convolution or pooling leaves tokens out."""
    strides = (getattr(m, "stride", 1) for m in projection.modules())
    return any((max(s) if isinstance(s, tuple) else s) > 1 for s in strides)


def name_of(module: Any) -> str:
    """A plugged module in an error: its name in the model and its class."""
    name = module.__dict__.get(NAME)
    kind = type(module).__name__
    return f"{name} ({kind})" if name else kind
