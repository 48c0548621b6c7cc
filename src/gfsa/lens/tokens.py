"""Finding tokens and their mask in whatever a model takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gfsa.operators import Operator


def first_tensor(value: Any) -> Tensor | None:
    """The tensor of floats that a block takes or gives, out of tuples, dicts and model outputs."""
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
        x: what a block takes or gives: batch first, sequence first, a grid ``(B, H, W, D)`` or
            ``(B, D, H, W)``, or the tokens of all samples one after another ``(ΣN, D)``, as graph
            libraries have them.
        v: the values of the attention inside the block, ``(..., H, N, d)``: they tell the axes.
            None if they are not known.
        attention: the attention module, asked for ``batch_first`` where shapes cannot tell.
        valid: ``(B, N)``; needed to take samples apart.
    """
    sequence_first = getattr(attention, "batch_first", True) is False
    length, batch = (0, 0) if v is None else (v.shape[-2], v.shape[:-3].numel())
    if x.dim() == 4:
        # features first or last: whichever leaves as many tokens as attention saw
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
    """The map itself, out of an operator that keeps a cache for decoding around it.

    What the lens applies must not end up in that cache.
    """
    inner = getattr(operator, "rows", None)
    return inner if isinstance(inner, Operator) else operator


def valid_from_operator(operator: Operator, v: Tensor) -> Tensor | None:
    """``(..., N)``, True where some token may attend to this one; None if all are.

    What padding is, as far as the attention map knows it.
    """
    visible, keys = operator.visibility(), None
    matrix = getattr(operator, "matrix", getattr(operator, "weights", None))
    if visible is not None:
        keys = visible.visible_keys()
    elif isinstance(matrix, Tensor):
        # a key that no row of no head gives any weight
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


# by which names batches carry masks, and whether True means that a token counts
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
