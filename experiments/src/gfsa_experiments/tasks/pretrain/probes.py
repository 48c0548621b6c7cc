"""Probes of a trained decoder: what it can copy, on which tokens it is good, where it looks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gfsa
from gfsa.lens.measure import attention_entropy
from gfsa.operators import Operator
from gfsa_experiments.tasks.pretrain.data import TokenRows

# sequences and rows at a time: the logits of 8 × 1,024 tokens take half a gigabyte
_BATCH = 8


def probe(
    model: nn.Module, valid: TokenRows, train: TokenRows, precision: torch.dtype | None, rows: int
) -> dict[str, Any]:
    """Everything that is measured, as plain data; the model is as before afterwards.

    ============== ==============================================================================
    ``induction``  loss on random tokens, and on the same tokens when they come a second time
    ``recall``     pairs of random tokens, then the same pairs in another order: loss on the second
                   token of a pair, the first and the second time
    ``position``   loss by octave of the position in a row of ``valid``
    ``frequency``  loss by how often the predicted token is in ``train``: ten groups, each with a
                   tenth of the predicted tokens, rarest first
    ``entropy``    by layer and head: the entropy of the attention map A as a share of its maximum
    ``sink``       by layer and head: the share of attention that the first token of a row gets
    ============== ==============================================================================

    Args:
        precision: of autocast; None for none.
        rows: how many rows of ``valid``, and how many random sequences.
    """
    device = next(model.parameters()).device
    count = min(rows, len(valid))
    ids = torch.cat(
        [
            valid.ids({"part": "valid", "rows": valid.rows[start : start + _BATCH].to(device)})
            for start in range(0, count, _BATCH)
        ]
    )[:count]
    vocabulary = int(ids.max()) + 1
    random = torch.Generator().manual_seed(0)
    copies = _copies(rows, valid.block, vocabulary, random).to(device)
    pairs = _pairs(rows, valid.block, vocabulary, random).to(device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _autocast(device, precision):
            return {
                "induction": _first_and_second(model, copies),
                "recall": _first_and_second(model, pairs, step=2),
                **_by_token(model, ids, train, vocabulary),
                **_maps(model, ids[:_BATCH]),
            }
    finally:
        model.train(was_training)


def _copies(rows: int, block: int, vocabulary: int, random: torch.Generator) -> Tensor:
    """``(rows, block)``: random tokens, and the same again."""
    half = torch.randint(vocabulary, (rows, block // 2), generator=random)
    return torch.cat([half, half], 1)


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
    losses = torch.cat([_losses(model, part) for part in ids.split(_BATCH)])
    # losses[:, i] is that of token i + 1. The first token of either half is left out: nothing
    # before it says what it is.
    half = ids.shape[1] // 2
    first, second = losses[:, : half - 1 : step], losses[:, half::step]
    return {"first": first.mean().item(), "second": second.mean().item()}


def _by_token(
    model: nn.Module, ids: Tensor, train: TokenRows, vocabulary: int
) -> dict[str, list[float]]:
    """The loss by position and by frequency."""
    losses = torch.cat([_losses(model, part) for part in ids.split(_BATCH)]).double().cpu()
    by_position, start = [], 0
    while start < losses.shape[1]:
        end = min(2 * start + 1, losses.shape[1])
        by_position.append(losses[:, start:end].mean().item())
        start = end
    frequency = train.counts(vocabulary)[ids[:, 1:].flatten().cpu()]
    order = frequency.argsort(stable=True)
    groups = losses.flatten()[order].tensor_split(10)
    return {"position": by_position, "frequency": [group.mean().item() for group in groups]}


def _losses(model: nn.Module, ids: Tensor) -> Tensor:
    """−log p of every token but the first, ``(rows, tokens − 1)``."""
    logits = model(
        input_ids=ids[:, :-1], attention_mask={"full_attention": None}, use_cache=False
    ).logits
    return F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")


def _maps(model: nn.Module, ids: Tensor) -> dict[str, list[list[float]]]:
    """Entropy and sink of every head, layer by layer.

    Filters are given the operator of A. A plain model gets filters for the time of the measurement:
    as they begin, they change nothing.
    """
    found: dict[str, list[list[float]]] = {"entropy": [], "sink": []}

    def look(filter: nn.Module, args: tuple[Operator, Tensor]) -> None:
        operator, v = args
        _, share = attention_entropy(operator, v)
        # A times the indicator of the first token is the column of attention that it gets
        indicator = torch.zeros_like(v)
        indicator[..., 0, :] = 1
        _, gets = operator.powers(indicator, 1)
        found["entropy"].append(share.float().mean(0).tolist())
        found["sink"].append(gets[..., 1:, 0].float().mean((0, 2)).tolist())

    with _plugged(model):
        hooks = [f.register_forward_pre_hook(look) for f in gfsa.filters_of(model).values()]
        try:
            _losses(model, ids)
        finally:
            for hook in hooks:
                hook.remove()
    return found


@contextlib.contextmanager
def _plugged(model: nn.Module) -> Iterator[None]:
    if gfsa.filters_of(model):
        yield
        return
    gfsa.plug(model)
    try:
        yield
    finally:
        gfsa.unplug(model)


def _autocast(device: torch.device, precision: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, precision, enabled=precision is not None)
