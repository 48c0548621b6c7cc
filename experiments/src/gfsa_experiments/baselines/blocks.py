"""Known Transformer blocks: where their branches end, their norms, and their masks."""

from __future__ import annotations

import csv
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gfsa.operators import Visibility
from gfsa_experiments.models.attention import SoftmaxAttention


@dataclass(frozen=True)
class Place:
    """Where tokens can be changed: the input or the output of a module of the block."""

    module: str
    side: Literal["input", "output"] = "output"

    def __str__(self) -> str:
        return f"{self.side} of {self.module}"


@dataclass(frozen=True)
class Anatomy:
    """The parts of one kind of block, by their paths inside it."""

    attention: str
    branches: dict[str, Place]
    """What is added to the residual stream, by name; ``"attention"`` is one of them."""
    norms: tuple[str, ...] = ()
    """The norms whose input holds all tokens of a sample."""
    after_attention: str | None = None
    """The norm that follows the addition of attention to the residual stream."""
    why_no_norm: str = ""
    """The reason, if there is no such norm."""
    masks_at: str = ""
    """The module whose arguments contain the masks; the block itself by default."""
    own_scales: tuple[str, ...] = ()
    """Paths of the parameters of a LayerScale that the block may have of its own."""


# by the name of the class: the libraries themselves are not imported. Swin's attention returns
# windows, which are merged again in the input of drop_path1
_TABLE = files("gfsa_experiments.baselines").joinpath("blocks.csv").read_text(encoding="utf-8")
_KNOWN = {line["class"]: line for line in csv.DictReader(_TABLE.splitlines())}
_registered: dict[type[nn.Module], Anatomy] = {}

FAMILIES = (
    "transformers' BERT, RoBERTa, ALBERT, GPT-2 and ViT, timm's ViT/DeiT, CaiT and Swin, "
    "nn.TransformerEncoderLayer, gfsa.models, GPSConv and SpeechBrain's encoders"
)


def register_block(cls: type[nn.Module], anatomy: Anatomy) -> None:
    """Teach :func:`gfsa.baselines.apply` a block class; registering ``cls`` again replaces it.

    Args:
        cls: the class of the block.
        anatomy: where the parts of such a block are.

    Raises:
        TypeError: if ``cls`` is no ``nn.Module`` class, or ``anatomy`` no :class:`Anatomy`.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"expected an nn.Module class, got {cls!r}")
    if not isinstance(anatomy, Anatomy):
        raise TypeError(f"expected a gfsa.baselines.Anatomy, got {anatomy!r}")
    _registered[cls] = anatomy


def anatomy_of(block: nn.Module) -> Anatomy | None:
    """The anatomy of ``block``, or None if it is no known block.

    A class derived from a known one counts as long as it does not override its forward.
    """
    kind: Any = type(block)
    for cls in kind.__mro__:
        known = _registered.get(cls) or _KNOWN.get(f"{cls.__module__}.{cls.__qualname__}")
        if known is not None and kind.forward is cls.forward:
            return known if isinstance(known, Anatomy) else _anatomy(known, block)
    return None


def _anatomy(line: dict[str, str], block: nn.Module) -> Anatomy:
    """The anatomy that a line of the table describes."""
    branches = {}
    for branch in line["branches"].split():
        name, _, place = branch.partition("=")
        module, _, side = place.partition(":")
        branches[name] = Place(module, "input" if side == "input" else "output")
    norms, after = tuple(line["norms"].split()), line["after_attention"] or None
    if line["norm_first"]:
        # an option of the block: norms before its branches, or after them
        after = norms[bool(getattr(block, line["norm_first"]))]
    rest = line["why_no_norm"], line["masks_at"], tuple(line["own_scales"].split())
    return Anatomy(line["attention"], branches, norms, after, *rest)


def width_of(block: nn.Module, anatomy: Anatomy) -> int:
    """The number of channels of the block's tokens."""
    channels = getattr(block, "channels", None)
    if isinstance(channels, int):
        return channels
    norm = anatomy.norms[0]
    weight = next(block.get_submodule(norm).parameters(), None)
    if weight is None:
        kind = type(block).__name__
        raise ValueError(f"cannot determine the width of a {kind}: its norm {norm} has no weights")
    return weight.shape[-1]


class Reader:
    """Reads which tokens see each other from the arguments of a block, or of its attention."""

    def __init__(self, module: nn.Module, attention: nn.Module) -> None:
        self.library = library_of(module)
        if self.library not in _READERS:
            kind, known = type(module).__name__, ", ".join(_READERS)
            raise ValueError(f"the masks of a {kind} cannot be read: expected a module of {known}")
        self.read, self.known_masks = _READERS[self.library]
        self.attention = attention
        parameters = inspect.signature(module.forward).parameters.values()
        by_place = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.names = tuple(each.name for each in parameters if each.kind in by_place)

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
        for name, value in given.items():
            is_mask = "mask" in name and isinstance(value, Tensor)
            if is_mask and name not in self.known_masks:
                raise TypeError(
                    f"{type(self.attention).__name__} is called with a mask {name}, which cannot "
                    "be read: the method would include tokens that it hides"
                )
        cache = _first(given, "past_key_values", "layer_past")
        if cache is not None:
            length = cache.get_seq_length(getattr(self.attention, "layer_idx", 0))
            # a static cache keeps its length on the device; reading it would synchronise
            if not isinstance(length, int) or length > 0:
                raise ValueError(
                    "this method needs all tokens, but earlier ones are in a cache (or the cache "
                    "is static), which keeps only their keys and values. Pass use_cache=False"
                )
        seen = self.read(self.attention, given, args[len(self.names) :])
        shape = None if seen.mask is None else tuple(seen.mask.shape)
        # tokens may be (B, N, D), (N, B, D) or (N, D)
        if shape and (shape[-1] not in tokens.shape[:-1] or shape[-2] not in (1, shape[-1])):
            raise ValueError(
                f"a mask of shape {shape} does not fit tokens of shape {tuple(tokens.shape)}: with "
                "a cache the layer gets only the newest tokens, and this method needs all of them. "
                "Pass use_cache=False"
            )
        return tokens, seen


def library_of(module: nn.Module) -> str:
    """The library that a module's class, or the class it derives from, comes from."""
    for cls in type(module).__mro__:
        for library in _READERS:
            if cls is not nn.Module and f"{cls.__module__}.".startswith(f"{library}."):
                return library
    return type(module).__module__.partition(".")[0]


def visible(
    pairs: Tensor | None = None, keys: Tensor | None = None, causal: bool = False
) -> Visibility:
    """What queries see by a library's masks.

    Args:
        pairs: bool (True is visible) or additive, ``(N, N)``, ``(B, N, N)`` or ``(B, H, N, N)``,
            the queries' axis possibly of size 1.
        keys: bool ``(B, N)``, True where a token counts.
    """
    if pairs is None:
        return Visibility(None if keys is None else keys[:, None], causal=causal)
    pairs = pairs[:, None] if pairs.dim() == 3 else pairs[(None,) * (4 - pairs.dim())]
    if pairs.is_floating_point():
        # libraries write -inf, or the smallest number
        pairs = pairs > torch.finfo(pairs.dtype).min / 2
    pairs = pairs.bool()
    if keys is not None:
        pairs = pairs & keys[:, None, None]
    if pairs.shape[-2] == 1:
        # the same keys for every query
        return Visibility(pairs[..., 0, :], causal=causal)
    if causal:
        size = pairs.shape[-2], max(pairs.shape[-2:])
        pairs = pairs & torch.ones(size, dtype=torch.bool, device=pairs.device).tril()
    return Visibility(pairs=pairs)


def _transformers(attention: Any, given: Mapping[str, Any], rest: Any) -> Visibility:
    mask = given.get("attention_mask")
    described = getattr(mask, "visible", None)
    if isinstance(described, Visibility):
        # what the masks of a plugged model say, not written out
        return described
    causal = bool(getattr(attention, "is_causal", False))
    if mask is None:
        return Visibility(causal=causal)
    if not isinstance(mask, Tensor):
        kind = type(mask).__name__
        raise TypeError(f"a mask of type {kind} cannot be read; use attn_implementation='sdpa'")
    if mask.dim() == 2:
        # flash attention's mask contains padding only
        return visible(keys=mask.bool(), causal=causal)
    return visible(mask)


def _timm(attention: Any, given: Mapping[str, Any], rest: Any) -> Visibility:
    return visible(given.get("attn_mask"), causal=bool(given.get("is_causal", False)))


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
    return visible(pairs, padding)


def _own(attention: Any, given: Mapping[str, Any], graph: tuple[Any, ...]) -> Visibility:
    mask = graph[0] if graph else None
    if isinstance(attention, SoftmaxAttention):
        return visible(mask)
    return visible(keys=None if mask is None else ~mask)


_OF_TORCH = {"attn_mask", "key_padding_mask", "src_key_padding_mask", "src_mask"}
# by library: what reads its masks, and the arguments that it reads or that are of cross-attention
_READERS: dict[str, tuple[Callable[[Any, Mapping[str, Any], Any], Visibility], set[str]]] = {
    "transformers": (_transformers, {"attention_mask", "encoder_attention_mask"}),
    "timm": (_timm, {"attn_mask", "mask"}),
    "speechbrain": (_torch, _OF_TORCH),
    "gfsa_experiments.models": (_own, {"mask"}),
    "torch": (_torch, _OF_TORCH),
}


def _first(given: Mapping[str, Any], *names: str) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)


def seen_by_tokens(visible: Visibility) -> Visibility:
    """The visibility for tokens that are not split into heads: what some head sees."""
    if visible.mask is None or visible.mask.shape[-3] == 1:
        return visible
    keys = None if visible.keys is None else visible.keys.any(-2, keepdim=True)
    pairs = None if visible.pairs is None else visible.pairs.any(-3, keepdim=True)
    options = (visible.causal, visible.window, visible.documents, visible.in_order)
    return Visibility(keys, pairs, *options)
