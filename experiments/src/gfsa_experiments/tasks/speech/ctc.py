"""A CTC loss with static shapes and without host synchronisation, for CUDA graphs.

``F.ctc_loss`` copies the lengths to the host, and its gradient on a GPU is not deterministic.
Here the forward variables α and the backward ones β are one recursion over the frames,

    α_t(s) = p_t(y_s)·(α_{t−1}(s) + α_{t−1}(s−1) + [y_s ≠ y_{s−2}]·α_{t−1}(s−2)),

where β is the α of reversed time and labels, and the gradient is their product. It launches four
small kernels per frame, which suits utterances of some hundred frames.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# stands for log 0; sums of some thousand of them stay finite
_NEVER = -1e30
_IMPOSSIBLE = -1e29


def ctc_loss(log_probs: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """``−log P(target)`` of each utterance, ``(B,)``; 0 where no alignment is possible.

    The same as ``F.ctc_loss(…, blank=0, reduction="none", zero_infinity=True)``.

    Args:
        log_probs: ``(B, T, V)``, normalised, float32.
        targets: ``(B, L)``, L at least 1; entries beyond an utterance's length are ignored.
        frames: ``(B,)``, at most T.
        lengths: ``(B,)``, at most L.
    """
    loss: Tensor = _CTC.apply(log_probs, targets, frames, lengths)
    return loss


class _CTC(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor
    ) -> Tensor:
        with torch.autocast(log_probs.device.type, enabled=False):
            loss, gradient = _loss_and_gradient(log_probs, targets, frames, lengths)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None, None], None, None, None


def _loss_and_gradient(
    log_probs: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    B, T, V = log_probs.shape
    L = targets.shape[1]
    spoken = torch.arange(T, device=log_probs.device) < frames[:, None]
    # reversed labels; entries beyond the length come last and are never reached
    place = (lengths[:, None] - 1 - torch.arange(L, device=targets.device)) % L
    forward, backward = _states(targets), _states(targets.gather(1, place))

    emitted = _emitted(log_probs, forward, spoken)
    reverse = _emitted(log_probs, backward, spoken).flip(1)
    alpha, beta = _recursion(
        torch.cat([emitted, reverse]), torch.cat([forward, backward])
    ).chunk(2)  # fmt: skip

    last = 2 * lengths[:, None]
    in_blank = alpha[:, -1].gather(1, last)
    in_label = alpha[:, -1].gather(1, (last - 1).clamp_min(0)).masked_fill(last == 0, _NEVER)
    total = torch.logaddexp(in_blank, in_label)[:, 0]

    mirrored = last - torch.arange(2 * L + 1, device=targets.device)
    inside = (mirrored >= 0)[:, None]
    beta = beta.flip(1).gather(2, mirrored.clamp_min(0)[:, None].expand(B, T, -1))
    log_share = alpha + beta - emitted - total[:, None, None]
    possible = total > _IMPOSSIBLE
    counted = inside & spoken[:, :, None] & possible[:, None, None]
    share = log_share.exp().masked_fill(~counted, 0.0)
    # a product with one-hot labels: index_add is not deterministic on a GPU
    labels = (forward[:, :, None] == torch.arange(V, device=targets.device)).to(share.dtype)
    return (-total).masked_fill(~possible, 0.0), -(share @ labels)


def _states(targets: Tensor) -> Tensor:
    """Labels with blanks around them, ``(B, 2L + 1)``."""
    B, L = targets.shape
    states = targets.new_zeros(B, 2 * L + 1)
    states[:, 1::2] = targets
    return states


def _emitted(log_probs: Tensor, states: Tensor, spoken: Tensor) -> Tensor:
    """Log-probability of each state's label, ``(B, T, S)``; only blanks after the end."""
    B, T, _ = log_probs.shape
    emitted = log_probs.gather(2, states[:, None].expand(B, T, -1))
    silence = torch.full_like(emitted[:, :1], _NEVER)
    silence[:, :, 0::2] = 0.0
    return torch.where(spoken[:, :, None], emitted, silence)


def _recursion(emitted: Tensor, states: Tensor) -> Tensor:
    """``log α``, ``(B, T, S)``."""
    B, T, S = emitted.shape
    # a label may follow another one without a blank in between if they differ
    skip = torch.full_like(emitted[:, 0], _NEVER)
    skip[:, 3::2].masked_fill_(states[:, 3::2] != states[:, 1:-2:2], 0.0)
    alpha = torch.full((T, B, S + 2), _NEVER, device=emitted.device)
    alpha[0, :, 2:4] = emitted[:, 0, :2]
    for t in range(1, T):
        before = alpha[t - 1]
        stay_or_step = torch.logaddexp(before[:, 2:], before[:, 1:-1])
        arriving = torch.logaddexp(stay_or_step, before[:, :-2] + skip)
        torch.add(arriving, emitted[:, t], out=alpha[t, :, 2:])
    return alpha[:, :, 2:].transpose(0, 1)
