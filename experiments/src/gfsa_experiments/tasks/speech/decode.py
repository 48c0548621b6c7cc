"""Decoding of CTC's probabilities: the best path, or the best text by prefix search."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfsa_experiments.tasks.speech.text import BLANK

_Prefix = tuple[int, ...]
_Scores = tuple[float, float]

# tokens per frame that the beam search considers
_CANDIDATES = 8


def best_path(logits: Tensor, lengths: Tensor) -> list[list[int]]:
    """The most likely token of each frame, without repetitions and blanks."""
    path = logits.argmax(-1)
    new = torch.ones_like(path, dtype=torch.bool)
    new[:, 1:] = path[:, 1:] != path[:, :-1]
    spoken = torch.arange(path.shape[1], device=path.device) < lengths[:, None]
    kept = (new & spoken & (path != BLANK)).cpu()
    return [row[keep].tolist() for row, keep in zip(path.cpu(), kept, strict=True)]


def prefix_search(logits: Tensor, lengths: Tensor, beam: int) -> list[list[int]]:
    """The most likely text of each utterance, summed over all paths of that text."""
    log_probs = logits.float().log_softmax(-1).cpu()
    ends = lengths.tolist()
    return [_search(rows[:end], beam) for rows, end in zip(log_probs, ends, strict=True)]


def _search(log_probs: Tensor, beam: int) -> list[int]:
    """Keep the ``beam`` best prefixes from frame to frame (Graves, 2012; Hannun, 2014).

    Each has two log-probabilities, for paths that end in a blank and for paths that end in its last
    token: a repeated token counts as a new one only after a blank.
    """
    scores, candidates = log_probs.topk(min(_CANDIDATES, log_probs.shape[1]), dim=1)
    best = [
        list(zip(*pair, strict=True))
        for pair in zip(scores.tolist(), candidates.tolist(), strict=True)
    ]
    prefixes: dict[_Prefix, _Scores] = {(): (0.0, -math.inf)}
    for row, frame in zip(log_probs.tolist(), best, strict=True):
        grown: dict[_Prefix, _Scores] = {}
        for prefix, (in_blank, in_token) in prefixes.items():
            either = _log_add(in_blank, in_token)
            repeated = in_token + row[prefix[-1]] if prefix else -math.inf
            _add(grown, prefix, either + row[BLANK], repeated)
            for score, token in frame:
                if token != BLANK:
                    before = in_blank if prefix and token == prefix[-1] else either
                    _add(grown, (*prefix, token), -math.inf, before + score)
        ranked = sorted(grown, key=lambda prefix: -_log_add(*grown[prefix]))
        prefixes = {prefix: grown[prefix] for prefix in ranked[:beam]}
    return list(next(iter(prefixes)))


def _add(scores: dict[_Prefix, _Scores], prefix: _Prefix, in_blank: float, in_token: float) -> None:
    old_blank, old_token = scores.get(prefix, (-math.inf, -math.inf))
    scores[prefix] = _log_add(old_blank, in_blank), _log_add(old_token, in_token)


def _log_add(a: float, b: float) -> float:
    high, low = (a, b) if a > b else (b, a)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
