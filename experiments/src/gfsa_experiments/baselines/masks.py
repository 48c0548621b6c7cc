"""Which tokens see each other in a layer: read from its arguments by its library's conventions.

Classes of one library give their masks different meanings (True may show or hide), or hide pairs by
code of their own. What was read from a layer's arguments is therefore compared with the attention
map, or with the masks of the operator, in the first forward of each kind of mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.operators import Operator
from gfsa.operators.visibility import Visibility
from gfsa.plugs.checks.proof import has_no_values
from gfsa_experiments.models.attention import SoftmaxAttention

# by library: the arguments that its reader below reads, and those of cross-attention
_OF_TORCH = {"attn_mask", "key_padding_mask", "src_key_padding_mask", "src_mask"}
_KNOWN_MASKS = {
    "transformers": {"attention_mask", "mask", "encoder_attention_mask"},
    "timm": {"attn_mask", "mask"},
    "speechbrain": _OF_TORCH,
    "gfsa_experiments.models": {"mask"},
    "torch": _OF_TORCH,
}

# Swin's window masks have -100 where others have -inf
_SWIN_HIDES_BELOW = -50.0


class Reader:
    """Reads which tokens see each other from the arguments of a module's forward.

    Args:
        module: the module whose arguments are read: a block, or an attention module.
        attention: the attention module inside it (or the module itself).
        whole: whether the method needs all tokens, so that none may be in a cache.
    """

    def __init__(self, module: nn.Module, attention: nn.Module, whole: bool) -> None:
        library = library_of(module)
        if library not in _READERS:
            raise ValueError(
                f"the masks of a {type(module).__name__} cannot be read: expected a module of "
                f"{', '.join(_READERS)}"
            )
        self.library = library
        self.attention = attention
        self.whole = whole
        kinds = inspect.Parameter
        self.names = tuple(
            name
            for name, parameter in inspect.signature(module.forward).parameters.items()
            if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        )

    def __call__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Visibility]:
        """The tokens that the module is called with, and which of them see each other."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens = given[self.names[0]]
        if tokens.is_nested:
            raise TypeError(
                "nested tensors are not supported here; pad the batch and pass a padding mask "
                "(nn.TransformerEncoder(..., enable_nested_tensor=False))"
            )
        known = _KNOWN_MASKS[self.library]
        for name, value in given.items():
            if "mask" in name and isinstance(value, Tensor) and name not in known:
                raise TypeError(
                    f"{type(self.attention).__name__} is called with a mask {name}, which cannot "
                    "be read: the method would include tokens that it hides"
                )
        if self.whole:
            _refuse_a_past(self.attention, given)
        seen = _READERS[self.library](self.attention, given, args[len(self.names) :])
        if self.whole and seen.mask is not None and not _fits(seen.mask, tokens):
            raise ValueError(
                f"a mask of shape {tuple(seen.mask.shape)} does not fit tokens of shape "
                f"{tuple(tokens.shape)}: with a cache the layer gets only the newest tokens, and "
                "this method needs all of them. Pass use_cache=False"
            )
        return tokens, seen


def library_of(module: nn.Module) -> str:
    """The library that a module's class, or the class it derives from, comes from."""
    for cls in type(module).__mro__:
        if cls is nn.Module:
            continue
        for library in _READERS:
            if f"{cls.__module__}.".startswith(f"{library}."):
                return library
    return type(module).__module__.partition(".")[0]


def _transformers(attention: Any, given: Mapping[str, Any], rest: Any) -> Visibility:
    # T5 and its relatives call it mask
    mask = _first(given, "attention_mask", "mask")
    own = _own_pairs(attention, given, mask)
    described = getattr(mask, "visible", None)
    if isinstance(described, Visibility):
        # what the masks of a plugged model say, not written out
        if own is None:
            return described
        mask = mask.tensor()
    causal = bool(getattr(attention, "is_causal", False))
    if mask is None:
        return Visibility.from_masks(own, causal=causal)
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"an attention mask of type {type(mask).__name__} cannot be read; use "
            "attn_implementation 'sdpa' or 'eager'"
        )
    if mask.dim() == 2:
        # flash attention's mask contains padding only
        return Visibility.from_masks(own, keys=mask.bool(), causal=causal)
    if mask.dim() == 3:
        mask = _of_windows(mask, next(iter(given.values())))
    seen = Visibility.from_masks(mask)
    return seen if own is None or seen.mask is None else Visibility.from_masks(seen.mask & own)


def _of_windows(mask: Tensor, windows: Tensor) -> Tensor:
    """Swin's masks, one for each window of an image, repeated for each image."""
    visible = mask > _SWIN_HIDES_BELOW if mask.is_floating_point() else mask.bool()
    return visible.repeat(len(windows) // len(mask), 1, 1)


def _own_pairs(attention: Any, given: Mapping[str, Any], mask: Tensor | None) -> Tensor | None:
    """Which pairs a module hides by a buffer of its own (OpenAI GPT, ImageGPT, GPT-Neo), if any.

    Such a module adds it to the mask that it is given.
    """
    own = dict(attention.named_buffers(recurse=False)).get("bias")
    length = next(iter(given.values())).shape[-2]
    if own is None or own.dim() != 4 or own.shape[-1] != own.shape[-2]:
        return None
    if mask is not None and mask.shape[-1] != length:
        # the rows of the newest tokens; the mask that comes with a cache is whole
        return None
    return own[..., :length, :length].bool()


def _timm(attention: Any, given: Mapping[str, Any], rest: Any) -> Visibility:
    windows = given.get("mask")
    if windows is not None:
        return Visibility.from_masks(_of_windows(windows, given["x"]))
    return Visibility.from_masks(given.get("attn_mask"), causal=bool(given.get("is_causal", False)))


def _torch(attention: Any, given: Mapping[str, Any], rest: Any) -> Visibility:
    """torch and SpeechBrain: True in a bool mask *hides* a key."""
    pairs = _first(given, "attn_mask", "src_mask")
    padding = _first(given, "key_padding_mask", "src_key_padding_mask")
    if pairs is not None and pairs.dtype == torch.bool:
        pairs = ~pairs
    if pairs is not None and pairs.dim() == 3:
        # one mask per head; SpeechBrain wraps torch's attention
        heads = getattr(attention, "att", attention).num_heads
        pairs = pairs.unflatten(0, (-1, heads))
    if padding is not None:
        seen = ~padding if padding.dtype == torch.bool else padding == 0
        padding = seen[None] if seen.dim() == 1 else seen
    return Visibility.from_masks(pairs, padding)


def _own(attention: Any, given: Mapping[str, Any], graph: tuple[Any, ...]) -> Visibility:
    mask = graph[0] if graph else None
    if isinstance(attention, SoftmaxAttention):
        return Visibility.from_masks(mask)
    return Visibility.from_masks(keys=None if mask is None else ~mask)


_READERS: dict[str, Callable[[Any, Mapping[str, Any], tuple[Any, ...]], Visibility]] = {
    "transformers": _transformers,
    "timm": _timm,
    "speechbrain": _torch,
    "gfsa_experiments.models": _own,
    "torch": _torch,
}


def _first(given: Mapping[str, Any], *names: str) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)


def _refuse_a_past(attention: Any, given: Mapping[str, Any]) -> None:
    cache = _first(given, "past_key_values", "layer_past")
    if cache is None:
        return
    length = cache.get_seq_length(getattr(attention, "layer_idx", 0))
    # a static cache keeps its length on the device; reading it would synchronise
    if not isinstance(length, int) or length > 0:
        raise ValueError(
            "this method needs all tokens, but earlier ones are in a cache (or the cache is "
            "static), which keeps only their keys and values. Pass use_cache=False"
        )


def _fits(mask: Tensor, tokens: Tensor) -> bool:
    # tokens may be (B, N, D), (N, B, D) or (N, D)
    return mask.shape[-1] in tokens.shape[:-1] and mask.shape[-2] in (1, mask.shape[-1])


# what a softmax leaves of a hidden key: Swin adds -100, others the smallest number
_HIDDEN = 1e-12

Kind = tuple[bool, ...]


def kind_of(read: Visibility) -> Kind:
    """What a layer was given: padding, pairs, causality, a window, documents."""
    given = (read.keys, read.pairs, read.window, read.documents)
    return (read.causal, *(part is not None for part in given))


def refusal_of_reading(
    read: Visibility, operator: Operator, v: Tensor, training: bool
) -> tuple[str | None, bool]:
    """How ``read`` differs from what the operator does, or None; and whether that was decisive.

    Args:
        read: which keys each query sees, as read from the layer's arguments.
        operator: the layer's attention map.
        v: its values, ``(B, H, N, D)``.
        training: whether entries of the map may have been dropped.
    """
    length = v.shape[-2]
    if v.is_meta or has_no_values(v) or length < 2:
        return None, False
    with torch.no_grad():
        visible = read.rows(0, length, length, v.device)
        used = operator.visibility()
        if used is not None:
            seen = used.rows(0, length, length, v.device)
            if bool((visible & ~seen).any()):
                return "a query would average keys that its attention hides", True
            return None, True
        try:
            matrix = operator.dense().abs()
        except TypeError:
            return None, False
        if matrix.shape[-1] != matrix.shape[-2]:
            # the rows of the newest tokens, with a cache
            return None, False
        visible = visible.expand(*visible.shape[:-2], length, length)
        # a query that sees nothing may have any row
        hidden = ~visible & visible.any(-1, keepdim=True)
        if bool(((matrix > _HIDDEN) & hidden).any()):
            return "a query attends to keys that its average would leave out", True
        if training or matrix.dtype not in (torch.float32, torch.float64):
            # an entry may be zero because it was dropped, or too small for its dtype
            return None, False
        unused = (matrix == 0).all(-3, keepdim=True)
        if bool((visible & unused).any()):
            return "a query would average keys that its attention hides", True
    return None, True
