"""Several documents in one row: which tokens belong together, and where each stands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.operators import Visibility


def positions_in_documents(ids: Tensor, end: int) -> Tensor:
    """How far each token of ``(rows, tokens)`` is from the start of its document in the row."""
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = torch.where(ids == end, place, 0)
    return place - starts.cummax(1).values


def mask_for(model: nn.Module, ids: Tensor, end: int) -> Any:
    """Where tokens may look, as ``model`` takes it.

    Plugged layers take a description of N numbers, and kernels for packed rows with it; their
    model's other layers get it written out. A plain model takes a tensor of N×N. Transformers would
    make the same one of the positions, but looks at them first: each step would wait for the GPU.
    """
    if any(isinstance(module, GraphFilter) for module in model.modules()):
        return describe_documents(ids, end)
    return within_documents(ids, end)


def within_documents(ids: Tensor, end: int) -> Tensor:
    """``(rows, 1, tokens, tokens)``, True where a token may look: back, in its own document."""
    document = _numbers(ids, end)
    same = document[:, :, :, None] == document[:, :, None, :]
    return same.tril()


def describe_documents(ids: Tensor, end: int) -> Any:
    """What :func:`within_documents` says, described: of one shape whatever the documents are."""
    from gfsa.adapters.transformers.masks import DescribedMask

    visible = Visibility(causal=True, documents=_numbers(ids, end), in_order=True)
    rows, tokens = ids.shape
    return DescribedMask(visible, rows, tokens, ids.device)


def _numbers(ids: Tensor, end: int) -> Tensor:
    """``(rows, 1, tokens)``, the number of each token's document in its row."""
    return (ids == end).cumsum(1)[:, None]
