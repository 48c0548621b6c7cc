"""Speech recognisers built from torch.nn: an encoder with CTC.

They follow SpeechBrain's models, for machines without SpeechBrain; outputs do not depend on the
padding of a batch.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Encoder = Literal["transformer", "branchformer"]

SUBSAMPLING = 4
"""Frames per token of the encoder."""


class Recognition(NamedTuple):
    """The output of a recogniser.

    ``states (B, N, E)`` of the encoder, of which ``lengths (B,)`` are real, the logits ``ctc
    (B, N, V)`` and, if there is a decoder, its logits ``attention (B, L + 1, V)``.
    """

    states: Tensor
    lengths: Tensor
    ctc: Tensor
    attention: Tensor | None


def subsampled(frames: Tensor) -> Tensor:
    """The number of encoder tokens for a number of frames."""
    return (frames + SUBSAMPLING - 1) // SUBSAMPLING


class TorchRecogniser(nn.Module):
    """Convolutions with a total stride of 4, an encoder, and a linear layer for CTC."""

    def __init__(
        self,
        features: int,
        vocabulary: int,
        encoder: Encoder,
        width: int,
        heads: int,
        layers: int,
        hidden: int,
        kernel: int,
        dropout: float,
        norm_first: bool,
    ) -> None:
        super().__init__()
        self.front = Subsampling(features, width)
        self.positions = Positions(width)
        self.dropout = nn.Dropout(dropout)

        def layer() -> nn.Module:
            if encoder == "branchformer":
                return BranchformerLayer(width, heads, hidden, kernel, dropout)
            return nn.TransformerEncoderLayer(
                width, heads, hidden, dropout, "gelu", batch_first=True, norm_first=norm_first
            )

        # nn.TransformerEncoder would copy the initial weights of one layer into all
        self.layers = nn.ModuleList([layer() for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.ctc = nn.Linear(width, vocabulary)

    def forward(
        self, features: Tensor, frames: Tensor, tokens: Tensor | None = None
    ) -> Recognition:
        """``features (B, T, F)``, of which ``frames (B,)`` are real; ``tokens`` are ignored."""
        x = self.dropout(self.positions(self.front(features, frames)))
        lengths = subsampled(frames)
        silent = _after(lengths, x.shape[1])
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=silent)
        x = self.norm(x)
        return Recognition(x, lengths, self.ctc(x), None)


class Subsampling(nn.Module):
    """Two convolutions over time with stride 2."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(features, width, 5, stride=2, padding=2)
        self.second = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.norm = nn.LayerNorm(width)
        self.activation = nn.GELU()

    def forward(self, features: Tensor, frames: Tensor) -> Tensor:
        x = self.activation(self.first(features.transpose(1, 2)))
        # padding must be zero before the second convolution too
        x = x.masked_fill(_after((frames + 1) // 2, x.shape[2])[:, None], 0.0)
        x = self.activation(self.second(x))
        x = self.norm(x.transpose(1, 2))
        return x.masked_fill(_after(subsampled(frames), x.shape[1])[:, :, None], 0.0)


class Positions(nn.Module):
    """``x + [sin(p·ω_i), cos(p·ω_i)]``, with ``ω_i = 10000^(−2i/E)`` and p the position."""

    table: Tensor

    def __init__(self, width: int, longest: int = 2500) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"width must be even for sines and cosines in pairs, got {width}")
        rate = torch.exp(-math.log(10_000.0) * torch.arange(0, width, 2) / width)
        angle = torch.arange(longest)[:, None] * rate
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.table):
            raise ValueError(
                f"expected at most {len(self.table)} tokens of {SUBSAMPLING} frames, "
                f"got {x.shape[1]}; cut the recording"
            )
        return x + self.table[: x.shape[1]]


class BranchformerLayer(nn.Module):
    """``x + W·[attention(norm(x)), gated(norm(x))]`` (Peng et al., 2022)."""

    def __init__(self, width: int, heads: int, hidden: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.gated_norm = nn.LayerNorm(width)
        self.gated = ConvolutionGating(width, hidden, kernel, dropout)
        self.merge = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        y = self.attention_norm(x)
        far, _ = self.attention(
            y, y, y, key_padding_mask=src_key_padding_mask, need_weights=False
        )  # fmt: skip
        near = self.gated(self.gated_norm(x), src_key_padding_mask)
        both = torch.cat([self.dropout(far), self.dropout(near)], dim=-1)
        return x + self.dropout(self.merge(both))


class ConvolutionGating(nn.Module):
    """cgMLP: ``W2·(a ⊙ conv(norm(b)))`` with ``[a, b] = gelu(W1·x)``, conv over time alone."""

    def __init__(self, width: int, hidden: int, kernel: int, dropout: float) -> None:
        super().__init__()
        half = hidden // 2
        self.up = nn.Linear(width, 2 * half)
        self.activation = nn.GELU()
        self.norm = nn.LayerNorm(half)
        self.conv = nn.Conv1d(half, half, kernel, padding=kernel // 2, groups=half)
        # the gate starts near 1
        nn.init.normal_(self.conv.weight, std=1e-6)
        nn.init.ones_(self.conv.bias)  # type: ignore[arg-type]
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(half, width)

    def forward(self, x: Tensor, silent: Tensor) -> Tensor:
        a, b = self.activation(self.up(x)).chunk(2, dim=-1)
        b = self.norm(b).masked_fill(silent[:, :, None], 0.0)
        gate = self.conv(b.transpose(1, 2)).transpose(1, 2)
        return self.down(self.dropout(a * gate))


def _after(lengths: Tensor, longest: int) -> Tensor:
    """``(B, longest)``, True behind the end of an utterance."""
    return torch.arange(longest, device=lengths.device) >= lengths[:, None]
