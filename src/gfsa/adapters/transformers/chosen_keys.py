"""Attention whose keys an indexer chooses (DeepSeek-V3.2, MiniMax-M3): the choice as a mask.

Such a module looks at the name of its attention implementation. For ``eager`` and ``sdpa`` it adds
the choice to the mask, for a sparse kernel it passes the indices on. A plugged module has another
name, so it passes the indices on, and the filtered ``eager`` and ``sdpa`` add them to the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INDICES = "indices"
BLOCKS = "block_indices"
CHOICES = frozenset((INDICES, BLOCKS))
"""The arguments of an attention function by which a module passes its choice on."""


def with_chosen_keys(
    module: Any, query: Tensor, key: Tensor, attention_mask: Any, kwargs: dict[str, Any]
) -> Any:
    """The mask with the chosen keys, which the module itself makes for ``eager`` and ``sdpa``.

    Args:
        module: the attention module.
        query: ``(B, H, N, D)``.
        key: ``(B, H, T, D)``.
        attention_mask: as the module passed it on.
        kwargs: the other arguments of the attention function; the choice is removed from them.
    """
    indices, blocks = kwargs.pop(INDICES, None), kwargs.pop(BLOCKS, None)
    if blocks is not None:
        keys, positions = key.shape[2], _positions(query, key, kwargs)
        build = module.indexer.build_block_mask
        return build(blocks, attention_mask, keys, query.dtype, query.device, positions)
    if indices is None:
        return attention_mask
    # (B, 1, N, T), True where the indexer has not chosen a key
    left_out = indices.new_ones((*indices.shape[:2], key.shape[2]), dtype=torch.bool)
    left_out = left_out.scatter(-1, indices.long(), False)[:, None]
    if attention_mask is None:
        raise ValueError(
            f"{type(module).__name__} chooses keys by an indexer, but passes no mask on; expected "
            "one that hides later tokens and padding. Leave it out with plug(..., layers=...)"
        )
    # a described mask is a bool one, and & writes it out
    if attention_mask.dtype == torch.bool:
        return attention_mask & ~left_out
    return attention_mask.masked_fill(left_out, torch.finfo(query.dtype).min)


def refuse_choice(name: str, kwargs: dict[str, Any]) -> None:
    """Raise where keys are chosen and the cache is paged: the indexer sees the new tokens only."""
    if any(kwargs.get(choice) is not None for choice in CHOICES):
        raise ValueError(
            f"{name} chooses its keys by an indexer, which knows nothing of a paged cache "
            "(continuous batching). Use generate()"
        )


def _positions(query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The queries' positions ``(B, N)``: those that were given, or else those of the last keys."""
    positions = kwargs.get("position_ids")
    if positions is None:
        keys = key.shape[2]
        positions = torch.arange(keys - query.shape[2], keys, device=query.device)
    return (positions if positions.dim() > 1 else positions[None]).expand(query.shape[0], -1)
