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

# in the __dict__ of a module that was given its tokens twice, in two tensors
_GIVEN_COPIES = "_gfsa_given_copies"

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
    norm(x))``). Values cannot be compared while a graph is compiled or captured; there two views of
    a whole tensor pass, and a copy if an earlier forward has shown that this module is given equal
    ones.
    """
    if query is key or (query.is_meta and query.shape == key.shape):
        return
    if query.shape[:-1] != key.shape[:-1]:
        got = f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}"
    elif _out_of_reach(query) or _out_of_reach(key):
        if _GIVEN_COPIES in module.__dict__ or _all_of_one_tensor(query, key):
            return
        raise ValueError(
            f"{type(module).__name__} was plugged as self-attention, but its key is another tensor "
            "than its query, and whether they hold the same tokens cannot be told while a graph "
            "is compiled or captured, or under torch.func. Pass the same tensor for both, run one "
            "forward without these first, or, if this is cross-attention, leave this layer out "
            "with gfsa.plug(model, layers=...)"
        )
    elif _same_memory(query, key) or _same_values(query, key):
        module.__dict__[_GIVEN_COPIES] = True
        return
    else:
        got = "key is not query: equal lengths, but other values"
    raise ValueError(
        f"{type(module).__name__} was plugged as self-attention, but {got}. Cross-attention and "
        "keys that come from a cache have no powers; leave this layer out with "
        "gfsa.plug(model, layers=...)"
    )


def forget_tokens(module: nn.Module) -> None:
    """Leave nothing on a module that is unplugged."""
    module.__dict__.pop(_GIVEN_COPIES, None)


def _out_of_reach(x: Tensor) -> bool:
    """Whether a tensor has no values to look at, or none yet."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _all_of_one_tensor(query: Tensor, key: Tensor) -> bool:
    """Whether both are the same view of all of a tensor, as told without reading any memory.

    Of all of it, because a compiler does not say where in a tensor a part begins.
    """
    base = query._base
    return (
        base is not None
        and base is key._base
        and query.shape == key.shape
        and query.stride() == key.stride()
        and query.numel() == base.numel()
    )


def _same_memory(query: Tensor, key: Tensor) -> bool:
    return (
        query.device == key.device
        and query.dtype == key.dtype
        and query.shape == key.shape
        and query.stride() == key.stride()
        and query.data_ptr() == key.data_ptr()
    )


def _same_values(query: Tensor, key: Tensor) -> bool:
    if torch.equal(query, key):
        return True
    # a model that diverges has NaNs in the same places, and is still self-attention
    both_nan = query.isnan() & key.isnan()
    return bool(both_nan.any()) and bool(((query == key) | both_nan).all())
