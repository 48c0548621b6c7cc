"""Distinguish self-attention from cross-attention, whose map has no powers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

Owners = Sequence[tuple[nn.Module, str]]
"""The modules that contain a module, innermost first, each with the attribute that leads to it."""

REASON = "cross-attention has no powers: its queries and keys are different tokens"

OTHER_SEQUENCE = (
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
    "context",
)
"""Arguments in which the forwards of many libraries take the tokens of another sequence."""

# attribute names of cross-attention: attn2 in diffusers, x_attn in Kosmos, text_cross_attn and
# final_attn_token_to_image in the mask decoders of SAM
_ATTRIBUTE = re.compile(
    r"cross_?att(entio)?n|^(attn2|x_attn)$|^enc(oder|dec)?_?att(entio)?n(_text)?$"
    r"|attn_(token_to_image|image_to_token)$"
)

_WRAPPING = {"self", "attention", "attn"}

# set in the __dict__ of a module that was once called with equal tokens in two tensors
_GIVEN_COPIES = "_gfsa_given_copies"

# layers whose only attention attends to another sequence
_CROSSING_LAYERS = {("ConformerDecoderLayer", "mha_layer")}


def crosses_by_design(owners: Owners) -> bool:
    """Whether a module's place in the model shows that it attends to another sequence.

    Shapes are not enough to decide: a decoder and its memory may have equal lengths.
    """
    # there may be one wrapper in between, or some that only hold this module; names further out say
    # nothing about it
    for place, (owner, attribute) in enumerate(owners):
        if place > 1 and not all(name in _WRAPPING for _, name in owners[:place]):
            break
        if _ATTRIBUTE.search(attribute.lower()):
            return True
        if "crossattention" in type(owner).__name__.lower():
            return True
        # torch's and SpeechBrain's decoder layers; the name alone is not enough, because many
        # models use it for their only attention
        if attribute == "multihead_attn" and hasattr(owner, "self_attn"):
            return True
        if (type(owner).__name__, attribute) in _CROSSING_LAYERS:
            return True
    if not owners:
        return False
    # a pooling head attends to the tokens with a learned query, or with their mean (Molmo 2)
    owner, attribute = owners[0]
    return "pool" in type(owner).__name__.lower() or "pooling" in attribute.lower()


def require_same_tokens(module: nn.Module, query: Tensor, key: Tensor) -> None:
    """Raise unless ``query`` and ``key`` hold the same tokens.

    Accepted are the same tensor, another view of it, and an equal copy
    (``mha(norm(x), norm(x), norm(x))``). Values cannot be compared while a graph is compiled or
    captured; then two views of a whole tensor are accepted, and two tensors if an earlier forward
    has shown that this module is called with equal copies. The graph compares those itself.
    """
    if query is key or (query.is_meta and query.shape == key.shape):
        return
    if query.shape != key.shape:
        got = f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}"
    elif has_no_values(query) or has_no_values(key):
        if _same_whole_view(query, key):
            return
        if not torch.compiler.is_compiling() and _is_transformed():
            query, key = _without_transforms(query, key)
            if not (has_no_values(query) or has_no_values(key)):
                if are_same_tokens(query, key):
                    return
                raise ValueError(_refusal(module, _OTHER_VALUES))
        if _GIVEN_COPIES in module.__dict__:
            _compare_in_graph(module, query, key)
            return
        raise ValueError(
            f"{_name_of(module)} was plugged as self-attention, but its key is another tensor "
            "than its query, and their values cannot be compared while a graph is compiled or "
            "captured. Pass the same tensor for both, run one forward without that first, or, if "
            "this is cross-attention, leave this layer out with gfsa.plug(model, layers=...)"
        )
    elif _same_memory(query, key) or _same_values(query, key):
        module.__dict__[_GIVEN_COPIES] = True
        return
    else:
        got = _OTHER_VALUES
    raise ValueError(_refusal(module, got))


_OTHER_VALUES = "its key has other values than its query"


def _refusal(module: nn.Module, got: str) -> str:
    return (
        f"{_name_of(module)} was plugged as self-attention, but {got}. Cross-attention and "
        "keys that come from a cache have no powers; leave this layer out with "
        "gfsa.plug(model, layers=...)"
    )


def _compare_in_graph(module: nn.Module, query: Tensor, key: Tensor) -> None:
    """Have a compiled, exported or captured graph raise for other tokens, each time it runs."""
    # torch.func, partitioned and nested tensors have no such assertion, nor have other devices
    if _is_transformed() or query.is_nested or hasattr(query, "device_mesh"):
        return
    if query.device.type not in ("cpu", "cuda"):
        return
    same = ((query == key) | (query.isnan() & key.isnan())).all()
    torch._assert_async(same, _refusal(module, _OTHER_VALUES))


def are_same_tokens(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are one, or equal copies; reads their values."""
    if first is second:
        return True
    if first.shape != second.shape or first.device != second.device:
        return False
    return _same_memory(first, second) or _same_values(first, second)


def _name_of(module: nn.Module) -> str:
    """A plugged module in an error: its name in the model and the class that it had before."""
    name = module.__dict__.get("_gfsa_name")
    kind = module.__dict__.get("_gfsa_class", type(module)).__name__
    return f"{name} ({kind})" if name else str(kind)


def forget_tokens(module: nn.Module) -> None:
    """Delete what :func:`require_same_tokens` has stored on a module that is unplugged."""
    module.__dict__.pop(_GIVEN_COPIES, None)


# make_fx records operations, a fake mode computes shapes
_MODES_WITHOUT_VALUES = (
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FAKE,
)


def has_no_values(x: Tensor) -> bool:
    """Whether a tensor's values cannot be read now: it is traced, transformed or captured."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    if any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES_WITHOUT_VALUES):
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_transformed() -> bool:
    """Whether torch.func runs the model now (vmap, grad, …), a constant to the compiler.

    The compiler asks while it traces, when the transforms of what it traces are entered.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


# all that torch.compiler.assume_constant_result does, which imports the whole compiler to do it
_is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _without_transforms(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors that torch.func has not transformed, equal if and only if the given ones are.

    The samples that vmap maps are on their first axes.
    """
    functorch = torch._C._functorch
    while wrapped := [x for x in (query, key) if functorch.is_functorch_wrapped_tensor(x)]:
        # the transform that was entered last: of one of them, or of both
        level = max(functorch.maybe_get_level(x) for x in wrapped)
        (query, one), (key, other) = (_without_transform(x, level) for x in (query, key))
        if one and not other:
            key = key.expand(len(query), *key.shape)
        if other and not one:
            query = query.expand(len(key), *query.shape)
    return query, key


def _without_transform(x: Tensor, level: int) -> tuple[Tensor, bool]:
    """A tensor without the transform of a level, if it has that one; whether it was vmap."""
    functorch = torch._C._functorch
    if not functorch.is_functorch_wrapped_tensor(x) or functorch.maybe_get_level(x) != level:
        return x, False
    axis = functorch.maybe_get_bdim(x)
    x = functorch.get_unwrapped(x)
    return (x, False) if axis < 0 else (x.movedim(axis, 0), True)


def _same_whole_view(query: Tensor, key: Tensor) -> bool:
    """Whether both are the same view of a whole tensor; reads no memory.

    Of a whole tensor, because a compiler does not know the storage offset of a part.
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
    # a diverged model has NaN at the same positions of both, and is still self-attention
    both_nan = query.isnan() & key.isnan()
    return bool(both_nan.any()) and bool(((query == key) | both_nan).all())
