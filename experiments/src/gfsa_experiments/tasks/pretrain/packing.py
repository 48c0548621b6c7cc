"""Several documents in one row: which tokens belong together, and where each stands."""

from __future__ import annotations

import torch
from torch import Tensor


def positions_in_documents(ids: Tensor, end: int) -> Tensor:
    """How far each token of ``(rows, tokens)`` is from the start of its document in the row."""
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = torch.where(ids == end, place, 0)
    return place - starts.cummax(1).values


def within_documents(ids: Tensor, end: int) -> Tensor:
    """``(rows, 1, tokens, tokens)``, True where a token may look: back, in its own document."""
    document = (ids == end).cumsum(1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same.tril()
