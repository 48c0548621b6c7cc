"""Find tokens and their mask in the inputs and outputs of a model's blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gfsa.operators import Operator


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in a block's input or output: nested tuples, lists, dicts."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.dim() >= 2 else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for part in value:
            found = first_tensor(part)
            if found is not None:
                return found
    return None


def as_tokens(
    x: Tensor, v: Tensor | None, attention: nn.Module, valid: Tensor | None
) -> Tensor | None:
    """Features as ``(B, N, D)``, or None if they are not features of tokens.

    Args:
        x: the input or output of a block: batch first, sequence first, a grid ``(B, H, W, D)`` or
            ``(B, D, H, W)``, or the concatenated tokens of all samples ``(ΣN, D)``, as in graph
            libraries.
        v: the values of the attention inside the block, ``(..., H, N, d)``, whose sizes identify
            the axes; None if they are not known.
        attention: the attention module, whose ``batch_first`` decides where sizes are ambiguous.
        valid: ``(B, N)``; needed to separate concatenated samples.
    """
    sequence_first = getattr(attention, "batch_first", True) is False
    length, batch = (0, 0) if v is None else (v.shape[-2], v.shape[:-3].numel())
    if x.dim() == 4:
        # features are first or last: the layout with as many tokens as the attention has
        last = x.shape[:3].numel() == length * batch
        first = x[:, 0].numel() == length * batch
        return x.flatten(2).mT if first and not last else x.flatten(1, 2)
    if x.dim() == 3:
        if length != batch:
            sequence_first = tuple(x.shape[:2]) == (length, batch)
        return x.transpose(0, 1) if sequence_first else x
    if x.dim() == 2 and valid is not None and int(valid.sum()) == len(x):
        dense = x.new_zeros(*valid.shape, x.shape[-1])
        dense[valid] = x
        return dense
    if x.dim() == 2 and len(x) == length and batch == 1:
        return x[None]
    return None


def whole_map(operator: Operator) -> Operator:
    """The operator inside one that decodes with a cache, or the operator itself.

    The lens applies the map to other tokens, which must not be added to that cache.
    """
    inner = getattr(operator, "rows", None)
    return inner if isinstance(inner, Operator) else operator


def valid_from_operator(operator: Operator, v: Tensor) -> Tensor | None:
    """``(..., N)``, True where at least one query may attend to the token; None if it is for all.

    The other tokens are padding, as far as the attention map shows it.
    """
    visible, keys = operator.visibility(), None
    matrix = getattr(operator, "matrix", getattr(operator, "weights", None))
    if visible is not None:
        keys = visible.visible_keys()
    elif isinstance(matrix, Tensor):
        # a masked key has zero weight in every row of every head
        keys = (matrix > 0)[(None,) * (3 - matrix.dim())].any(-2).any(-2)
    if keys is None or keys.shape[-1] != v.shape[-2] or bool(keys.all()):
        return None
    return keys.expand(*v.shape[:-3], v.shape[-2])


def valid_from_batch(batch: Any, layer: str) -> Tensor | None:
    """The padding mask that came with a batch, ``(B, N)``, True where a token counts."""
    if not isinstance(batch, Mapping):
        return None
    decoding = "decoder_input_ids" in batch or "decoder_inputs_embeds" in batch
    ours = decoding and "decoder" in layer.split(".")
    for name, sign in _MASKS_OF_DECODER if ours else _MASKS:
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return mask.bool() if sign else ~mask.bool()
    return None


# names of masks in batches, and whether True means that a token counts
_MASKS = (
    ("attention_mask", True),
    ("src_key_padding_mask", False),
    ("key_padding_mask", False),
)
_MASKS_OF_DECODER = (("decoder_attention_mask", True), ("tgt_key_padding_mask", False))


def fits(valid: Tensor | None, x: Tensor) -> Tensor | None:
    """``valid`` on x's device if it is a mask of x's tokens ``(B, N, D)``, else None."""
    if valid is None or valid.shape != x.shape[:2]:
        return None
    return valid.to(x.device)
