"""Telling self-attention from cross-attention, whose map has no powers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Owners = Sequence[tuple[nn.Module, str]]
"""A module's owners, innermost first, each with the name of the attribute that leads inwards."""

REASON = "cross-attention has no powers: its queries and keys are different tokens"

_ATTRIBUTES = {
    "attn2",  # diffusers
    "cross_attention",
    "cross_attn",
    "crossattention",
    "enc_attn",
    "encdecattention",
    "encoder_attn",
    "encoder_attention",
}

# layers whose only attention looks at another sequence
_CROSSING_LAYERS = {("ConformerDecoderLayer", "mha_layer")}


def crosses_by_design(owners: Owners) -> bool:
    """Whether a module's place in the model says that it looks at another sequence.

    Decided by place because shapes cannot tell: a decoder and its memory may have equal lengths.
    """
    # a wrapper may stand between; further out, a name says nothing about what is in here
    for owner, attribute in owners[:2]:
        if attribute.lower() in _ATTRIBUTES or "crossattention" in type(owner).__name__.lower():
            return True
        # torch's and speechbrain's decoder layers; the name alone says nothing, many people give
        # it to their only attention
        if attribute == "multihead_attn" and hasattr(owner, "self_attn"):
            return True
        if (type(owner).__name__, attribute) in _CROSSING_LAYERS:
            return True
    # a pooling head looks at the tokens with a query of its own
    return bool(owners) and "pool" in type(owners[0][0]).__name__.lower()


def require_same_tokens(module: nn.Module, query: Tensor, key: Tensor) -> None:
    """Raise unless ``query`` and ``key`` hold the same tokens.

    The same tensor does, and so does another view of it or an equal copy (``mha(norm(x), norm(x),
    norm(x))``). Values cannot be compared while a graph is being compiled; there the shapes decide.
    """
    if query is key:
        return
    if query.shape[:-1] == key.shape[:-1]:
        if torch.compiler.is_compiling() or _same_memory(query, key) or torch.equal(query, key):
            return
        got = "key is not query: equal lengths, but other values"
    else:
        got = f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}"
    raise ValueError(
        f"{type(module).__name__} was plugged as self-attention, but {got}. Cross-attention and "
        "keys that come from a cache have no powers; leave this layer out with "
        "gfsa.plug(model, layers=...)"
    )


def _same_memory(query: Tensor, key: Tensor) -> bool:
    return (
        query.device == key.device
        and query.dtype == key.dtype
        and query.shape == key.shape
        and query.stride() == key.stride()
        and query.data_ptr() == key.data_ptr()
    )
