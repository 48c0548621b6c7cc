"""The decoder: Qwen3 of transformers in any size, and the ways to normalise queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

QKNorm = Literal["learned", "none", "fixed", "temperature"]


@dataclass(frozen=True)
class Sizes:
    """A decoder in numbers."""

    depth: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Width inside the MLP."""
    vocabulary: int
    block: int
    """Tokens of a row."""
    tied: bool
    """The head has the weights of the embedding."""

    def flops(self) -> float:
        """Forward and backward of one row, without what is not a matrix product.

        .. math:: n\\,(6 P + 6 \\cdot depth \\cdot heads \\cdot head\\_dim \\cdot n)

        with the P weights that tokens are multiplied with; causal attention is half of a square.
        """
        inner = self.heads * self.head_dim
        attention = self.width * (2 * inner + 2 * self.kv_heads * self.head_dim)
        weights = self.depth * (attention + 3 * self.width * self.mlp)
        weights += self.width * self.vocabulary
        return self.block * (6.0 * weights + 6.0 * self.depth * inner * self.block)


def build_decoder(sizes: Sizes, qk_norm: QKNorm, end: int | None = None) -> Any:
    """A new Qwen3: RMSNorm, RoPE, SwiGLU, no biases, no dropout.

    Args:
        qk_norm: ``learned``: normalised heads with a learned gain per channel, as Qwen3 has them;
            ``none``: as Llama; ``fixed``: normalised, no gains; ``temperature``: normalised, and
            one learned factor per head.
        end: the token that begins a document.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.depth,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.block,
        tie_word_embeddings=sizes.tied,
        use_cache=False,
        bos_token_id=end,
        eos_token_id=end,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if qk_norm == "learned":
        return model
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_norm, attention.k_norm = nn.Identity(), nn.Identity()
        if qk_norm != "none":
            attention.k_norm = HeadNorm(config.rms_norm_eps)
            heads = sizes.heads if qk_norm == "temperature" else 0
            attention.q_norm = HeadNorm(config.rms_norm_eps, heads)
    return model


class HeadNorm(nn.Module):
    r"""RMS normalisation over the channels of a head, without gains.

    .. math:: y_h = t_h\, x_h / \sqrt{\operatorname{mean}(x_h^2) + ε}

    Args:
        eps: ε.
        heads: how many learned :math:`t_h` there are, one in the beginning; 0 for none.
    """

    def __init__(self, eps: float, heads: int = 0) -> None:
        super().__init__()
        self.eps = eps
        # one dimension: what has more is decayed
        self.temperature = nn.Parameter(torch.ones(heads)) if heads else None

    def forward(self, x: Tensor) -> Tensor:
        """``(…, heads, head_dim)`` to the same."""
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.temperature is not None:
            y = y * self.temperature[:, None]
        return y.to(x.dtype)
