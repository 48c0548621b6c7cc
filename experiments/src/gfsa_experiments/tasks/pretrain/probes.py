"""Probes of a trained decoder: what it can copy, and how its loss falls along a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa_experiments.tasks.pretrain.data import TokenRows

# rows at a time: the logits of 8 × 1,024 tokens take half a gigabyte
_BATCH = 8


def probe(
    model: nn.Module, valid: TokenRows, precision: torch.dtype | None, rows: int
) -> dict[str, Any]:
    """Everything that is measured, as plain data; the model is as before afterwards.

    ============== ==============================================================================
    ``induction``  loss on random tokens, and on the same tokens when they come a second time
    ``recall``     pairs of random tokens, then the same pairs in another order: loss on the second
                   token of a pair, the first and the second time
    ``position``   loss by octave of the position in a row of ``valid``
    ============== ==============================================================================

    Args:
        precision: of autocast; None for none.
        rows: how many rows of ``valid``, and how many random sequences.
    """
    device = next(model.parameters()).device
    taken = valid.rows[:rows].to(device).split(_BATCH)
    ids = torch.cat([valid.ids({"part": "valid", "rows": some}) for some in taken])
    vocabulary, random = int(ids.max()) + 1, torch.Generator().manual_seed(0)
    half = torch.randint(vocabulary, (rows, valid.block // 2), generator=random)
    pairs = _pairs(rows, valid.block, vocabulary, random)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, precision, precision is not None):
            losses = _losses(model, ids).double()
            octaves = [2**k - 1 for k in range(1, losses.shape[1].bit_length())]
            return {
                "induction": _first_and_second(model, torch.cat([half, half], 1).to(device)),
                "recall": _first_and_second(model, pairs.to(device), step=2),
                # the mean over positions 0, 1 to 2, 3 to 6 and so on
                "position": [part.mean().item() for part in losses.tensor_split(octaves, 1)],
            }
    finally:
        model.train(was_training)


def _pairs(rows: int, block: int, vocabulary: int, random: torch.Generator) -> Tensor:
    """``(rows, block)``: key, value, key, value …, all keys of a row different, then the same pairs
    in another order."""
    count = min(block // 4, vocabulary // 2)
    keys = torch.stack([torch.randperm(vocabulary, generator=random)[:count] for _ in range(rows)])
    values = torch.randint(vocabulary, (rows, count), generator=random)
    order = torch.stack([torch.randperm(count, generator=random) for _ in range(rows)])
    first = torch.stack([keys, values], -1)
    second = torch.stack([keys.gather(1, order), values.gather(1, order)], -1)
    return torch.cat([first, second], 1).flatten(1)


def _first_and_second(model: nn.Module, ids: Tensor, step: int = 1) -> dict[str, float]:
    """The loss on the first and on the second half of sequences, on every ``step``-th token."""
    losses = _losses(model, ids)
    # losses[:, i] is that of token i + 1. The first token of either half is left out: nothing
    # before it says what it is.
    half = ids.shape[1] // 2
    first, second = losses[:, : half - 1 : step], losses[:, half::step]
    return {"first": first.mean().item(), "second": second.mean().item()}


def _losses(model: nn.Module, ids: Tensor) -> Tensor:
    """−log p of every token but the first, ``(rows, tokens − 1)``."""
    found = []
    for part in ids.split(_BATCH):
        given = {"attention_mask": {"full_attention": None}, "use_cache": False}
        logits = model(input_ids=part[:, :-1], **given).logits.float()
        found.append(F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none"))
    return torch.cat(found)
