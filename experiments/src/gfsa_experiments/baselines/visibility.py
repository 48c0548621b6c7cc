"""Which tokens of a block see each other, and the mean of the tokens that a query sees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gfsa.operators import Visibility
from gfsa.operators.base import at_least_float32
from gfsa.operators.call import is_exporting
from gfsa_experiments.models.attention import SoftmaxAttention

# the longest scan that torch's compiler keeps within one program of a GPU
CHUNK = 128
# by library: the arguments that its reader below reads, and those of cross-attention
_OF_TORCH = {"attn_mask", "key_padding_mask", "src_key_padding_mask", "src_mask"}
_KNOWN_MASKS = {
    "transformers": {"attention_mask", "encoder_attention_mask"},
    "timm": {"attn_mask", "mask"},
    "speechbrain": _OF_TORCH,
    "gfsa_experiments.models": {"mask"},
    "torch": _OF_TORCH,
}


class Reader:
    """Reads which tokens see each other from the arguments of a block's forward.

    Args:
        module: the module whose arguments are read: a block, or its attention.
        attention: the attention module inside it (or the module itself).
    """

    def __init__(self, module: nn.Module, attention: nn.Module) -> None:
        self.library = library_of(module)
        if self.library not in _READERS:
            raise ValueError(
                f"the masks of a {type(module).__name__} cannot be read: expected a module of "
                f"{', '.join(_READERS)}"
            )
        self.attention = attention
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
        for name, value in given.items():
            known = name in _KNOWN_MASKS[self.library]
            if "mask" in name and isinstance(value, Tensor) and not known:
                raise TypeError(
                    f"{type(self.attention).__name__} is called with a mask {name}, which cannot "
                    "be read: the method would include tokens that it hides"
                )
        _refuse_a_past(self.attention, given)
        seen = _READERS[self.library](self.attention, given, args[len(self.names) :])
        if seen.mask is not None and not _fits(seen.mask, tokens):
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
    mask = given.get("attention_mask")
    described = getattr(mask, "visible", None)
    if isinstance(described, Visibility):
        # what the masks of a plugged model say, not written out
        return described
    causal = bool(getattr(attention, "is_causal", False))
    if mask is None:
        return Visibility(causal=causal)
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"an attention mask of type {type(mask).__name__} cannot be read; use "
            "attn_implementation 'sdpa' or 'eager'"
        )
    if mask.dim() == 2:
        # flash attention's mask contains padding only
        return Visibility.from_masks(keys=mask.bool(), causal=causal)
    return Visibility.from_masks(mask)


def _timm(attention: Any, given: Mapping[str, Any], rest: Any) -> Visibility:
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


def mean_of_visible(visible: Visibility, x: Tensor, queries: int) -> Tensor:
    r""":math:`m_i = \frac{1}{|S_i|} \sum_{j \in S_i} x_j`, where query i sees the keys S_i.

    Args:
        x: ``(B, H, N, D)``.
        queries: the number of queries, the newest tokens if there are fewer than N.

    Returns:
        ``(B, H, queries or 1, D)`` in float32 at least; zeros for a query that sees no key.
    """
    dtype = at_least_float32(x.dtype)
    keys, pairs = visible.keys, visible.pairs
    if pairs is not None:
        # weights rather than a sum to divide, which could leave the range of float16
        weights = pairs.to(dtype) / pairs.sum(-1, keepdim=True).clamp(min=1)
        return (weights.to(x.dtype) @ x).to(dtype)
    described = visible.window is not None or visible.documents is not None
    if keys is not None and not described:
        x = x.masked_fill(~keys[..., None], 0.0)
    # torch's cumsum is not deterministic on a GPU
    if described or (visible.causal and torch.are_deterministic_algorithms_enabled()):
        weights = mean_matrix(visible, x.shape[-2], x)[..., x.shape[-2] - queries :, :]
        return (weights @ x).to(dtype)
    if visible.causal:
        mean = running_sum(x, dtype) / _counts_so_far(visible, x)
        return mean[..., x.shape[-2] - queries :, :]
    if keys is not None:
        count = keys[..., None].sum(-2, keepdim=True).clamp(min=1)
        return x.sum(-2, keepdim=True, dtype=dtype) / count
    return x.mean(-2, keepdim=True, dtype=dtype)


def _counts_so_far(visible: Visibility, x: Tensor) -> Tensor:
    """``(..., N, 1)``, how many keys a query of a causal layer sees, and 1 where it is none."""
    if visible.keys is not None:
        return running_sum(visible.keys[..., None], torch.int64).clamp(min=1)
    return torch.arange(1, x.shape[-2] + 1, device=x.device)[:, None]


def mean_matrix(visible: Visibility, length: int, like: Tensor) -> Tensor:
    """The matrix of the mean, ``(B or 1, H or 1, N, N)``: row i has ``1/|S_i|`` on S_i."""
    seen = visible.rows(0, length, length, like.device)
    seen = seen.expand(*seen.shape[:-2], length, length)
    seen = seen[(None,) * (4 - seen.dim())]
    dtype = at_least_float32(like.dtype)
    return (seen.to(dtype) / seen.sum(-1, keepdim=True).clamp(min=1)).to(like.dtype)


def seen_by_tokens(visible: Visibility) -> Visibility:
    """The visibility for tokens that are not split into heads: what some head sees."""
    if visible.mask is None or visible.mask.shape[-3] == 1:
        return visible
    keys = None if visible.keys is None else visible.keys.any(-2, keepdim=True)
    pairs = None if visible.pairs is None else visible.pairs.any(-3, keepdim=True)
    options = (visible.causal, visible.window, visible.documents, visible.in_order)
    return Visibility(keys, pairs, *options)


def running_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    r"""``x.cumsum(-2, dtype=dtype)``, :math:`s_i = \sum_{j \le i} x_j` over the tokens.

    The compiler splits longer scans between programs where there are few of them, and cannot fuse
    such a scan with an operand that has no token axis (a factor per head or channel): up to torch
    2.11 it ends with a TypeError (https://github.com/pytorch/pytorch/issues/180221), in the forward
    or in the gradient. Compiled models therefore sum chunk by chunk.

    Args:
        x: ``(..., N, D)``.
    """
    # an exported program has one form for all lengths
    if not torch.compiler.is_compiling() or is_exporting():
        return x.cumsum(-2, dtype=dtype)
    return sum_by_chunks(x, dtype)


def sum_by_chunks(x: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`running_sum` by scans of at most :data:`CHUNK` tokens."""
    tokens = x.shape[-2]
    if tokens <= CHUNK:
        return x.cumsum(-2, dtype=dtype)
    filled = F.pad(x, (0, 0, 0, -tokens % CHUNK))
    within = filled.unflatten(-2, (-1, CHUNK)).cumsum(-2, dtype=dtype)
    whole = sum_by_chunks(within[..., -1, :], dtype)
    before = F.pad(whole[..., :-1, :], (0, 0, 1, 0))
    return (within + before[..., None, :]).flatten(-3, -2)[..., :tokens, :]
