"""Reading a layer's masks from its arguments, by the conventions of the library it is from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.operators.visibility import Visibility

_KNOWN_MASKS = {
    "attention_mask",
    "attn_mask",
    "key_padding_mask",
    "mask",
    "src_key_padding_mask",
    "src_mask",
    # of the tokens that cross-attention looks at
    "encoder_attention_mask",
}

# Swin's windows say -100 where others say -inf
_SWIN_HIDES_BELOW = -50.0


class Reader:
    """Reads the sight of a module from the arguments of its forward.

    Args:
        module: whose arguments are read: a block, or an attention module.
        attention: the attention module inside (or itself).
        whole: whether all tokens have to be there, none of them in a cache.
    """

    def __init__(self, module: nn.Module, attention: nn.Module, whole: bool) -> None:
        library = library_of(module)
        if library not in _READERS:
            raise ValueError(
                f"the masks of a {type(module).__name__} cannot be read: known are modules of "
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
        """The tokens that the module is given, and what they see."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens = given[self.names[0]]
        if tokens.is_nested:
            raise TypeError(
                "nested tensors are not taken here; pad the batch and give a padding mask "
                "(nn.TransformerEncoder(..., enable_nested_tensor=False))"
            )
        for name, value in given.items():
            if "mask" in name and isinstance(value, Tensor) and name not in _KNOWN_MASKS:
                raise TypeError(
                    f"{type(self.attention).__name__} is given a mask called {name}, which cannot "
                    "be read here: its tokens would see too much"
                )
        if self.whole:
            _refuse_a_past(self.attention, given)
        seen = _READERS[self.library](self.attention, given, args[len(self.names) :])
        if self.whole and seen.mask is not None and not _fits(seen.mask, tokens):
            raise ValueError(
                f"a mask of shape {tuple(seen.mask.shape)} does not belong to tokens of shape "
                f"{tuple(tokens.shape)}: with a cache only the newest tokens are there, and this "
                "method looks at all of them. Pass use_cache=False"
            )
        return tokens, seen


def library_of(module: nn.Module) -> str:
    """The library that a module's class comes from, whatever has been derived from it."""
    for cls in type(module).__mro__:
        name = cls.__module__
        if cls is nn.Module or name.startswith("gfsa.plugs"):
            continue
        for library in _READERS:
            if name == library or name.startswith(f"{library}."):
                return library
    return type(module).__module__.partition(".")[0]


def _transformers(attention: Any, given: Mapping[str, Any], rest: Any) -> Visibility:
    mask = given.get("attention_mask")
    causal = bool(getattr(attention, "is_causal", False))
    if mask is None:
        return Visibility.from_masks(causal=causal)
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"an attention mask of type {type(mask).__name__} cannot be read; use "
            "attn_implementation 'sdpa' or 'eager'"
        )
    if mask.dim() == 2:
        # flash attention: padding alone
        return Visibility.from_masks(keys=mask.bool(), causal=causal)
    return Visibility.from_masks(mask)


def _timm(attention: Any, given: Mapping[str, Any], rest: Any) -> Visibility:
    windows = given.get("mask")
    if windows is not None:
        # one mask for each window of an image, image after image
        images = len(given["x"]) // len(windows)
        return Visibility.from_masks((windows > _SWIN_HIDES_BELOW).repeat(images, 1, 1))
    return Visibility.from_masks(given.get("attn_mask"), causal=bool(given.get("is_causal", False)))


def _torch(attention: Any, given: Mapping[str, Any], rest: Any) -> Visibility:
    """torch and SpeechBrain: in bool masks, True is what is *not* seen."""
    pairs = _first(given, "attn_mask", "src_mask")
    padding = _first(given, "key_padding_mask", "src_key_padding_mask")
    if pairs is not None and pairs.dtype == torch.bool:
        pairs = ~pairs
    if pairs is not None and pairs.dim() == 3:
        # a mask for each head; SpeechBrain wraps torch's attention
        heads = getattr(attention, "att", attention).num_heads
        pairs = pairs.unflatten(0, (-1, heads))
    if padding is not None:
        seen = ~padding if padding.dtype == torch.bool else padding == 0
        padding = seen[None] if seen.dim() == 1 else seen
    return Visibility.from_masks(pairs, padding)


def _own(attention: Any, given: Mapping[str, Any], graph: tuple[Any, ...]) -> Visibility:
    from gfsa.models.attention import SoftmaxAttention

    mask = graph[0] if graph else None
    if isinstance(attention, SoftmaxAttention):
        return Visibility.from_masks(mask)
    return Visibility.from_masks(keys=None if mask is None else ~mask)


_READERS: dict[str, Callable[[Any, Mapping[str, Any], tuple[Any, ...]], Visibility]] = {
    "transformers": _transformers,
    "timm": _timm,
    "speechbrain": _torch,
    "gfsa.models": _own,
    "torch": _torch,
}


def _first(given: Mapping[str, Any], *names: str) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)


def _refuse_a_past(attention: Any, given: Mapping[str, Any]) -> None:
    cache = _first(given, "past_key_values", "layer_past")
    if cache is None:
        return
    length = cache.get_seq_length(getattr(attention, "layer_idx", 0))
    # a static cache keeps its length on the device, where it is not waited for
    if not isinstance(length, int) or length > 0:
        raise ValueError(
            "this method looks at all tokens, but a cache has taken in earlier ones (or is a "
            "static one): only keys and values are kept there. Pass use_cache=False"
        )


def _fits(mask: Tensor, tokens: Tensor) -> bool:
    # tokens may be (B, N, D), (N, B, D) or (N, D)
    return mask.shape[-1] in tokens.shape[:-1] and mask.shape[-2] in (1, mask.shape[-1])
