"""The decoder: Qwen3 of transformers in any size, and the variants of it that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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


def build_decoder(
    sizes: Sizes,
    end: int | None = None,
    qk_norm: QKNorm = "learned",
    init_std: float = 0.02,
    gate: bool = False,
    tokenwise: bool = False,
    shift_keys: bool = False,
    fast_gates: bool = False,
) -> Any:
    """A new Qwen3: RMSNorm, RoPE, SwiGLU, no biases, no dropout.

    Args:
        end: the token that begins a document.
        qk_norm: ``learned``: normalised heads with a learned gain per channel, as Qwen3 has them;
            ``none``: as Llama; ``fixed``: normalised, no gains; ``temperature``: normalised, and
            one learned factor per head.
        init_std: standard deviation of the random weights.
        gate: see :class:`GatedAttention`.
        tokenwise: see :class:`TokenwiseCoefficients`.
        shift_keys: see :class:`ShiftedKeys`.
        fast_gates: weights of gates and token-wise coefficients are trained as gains, at their rate
            and without decay.
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
        initializer_range=init_std,
        bos_token_id=end,
        eos_token_id=end,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for layer in model.model.layers:
        attention = layer.self_attn
        if qk_norm != "learned":
            attention.q_norm, attention.k_norm = nn.Identity(), nn.Identity()
        if qk_norm in ("fixed", "temperature"):
            attention.k_norm = HeadNorm(config.rms_norm_eps)
            learned = sizes.heads if qk_norm == "temperature" else 0
            attention.q_norm = HeadNorm(config.rms_norm_eps, learned)
        if shift_keys:
            keys = ShiftedKeys(sizes.kv_heads)
            attention.k_norm = nn.Sequential(attention.k_norm, keys)
        if gate:
            layer.self_attn = GatedAttention(attention, sizes, init_std)
        elif tokenwise:
            layer.self_attn = TokenwiseCoefficients(attention, sizes)
    if fast_gates:
        names = [name for name, _ in model.named_parameters() if name.endswith(".gate.weight")]
        # the optimiser asks a model for what it does not decay
        model.no_weight_decay = partial(set, names)
    return model


class GatedAttention(nn.Module):
    r"""Attention whose heads are gated by the layer's input, token by token.

    .. math:: y = \operatorname{concat}_h\big(2\,σ(x\,w_h)\;(A_h V_h)\big)\, W_O

    Gated attention has no factor 2; with it, the gates of small random :math:`w_h` begin at one.

    Args:
        attention: a decoder's attention; its output projection moves into this module.
    """

    def __init__(self, attention: Any, sizes: Sizes, init_std: float) -> None:
        super().__init__()
        self.o_proj: nn.Module = attention.o_proj
        attention.o_proj = nn.Identity()
        self.attention: nn.Module = attention
        self.gate = nn.Linear(sizes.width, sizes.heads, bias=False)
        nn.init.normal_(self.gate.weight, std=init_std)

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, Any]:
        """As the attention that it wraps."""
        heads, weights = self.attention(hidden_states=hidden_states, **others)
        factors = 2 * torch.sigmoid(self.gate(hidden_states).float())
        gated = heads.unflatten(-1, (factors.shape[-1], -1)) * factors[..., None].to(heads.dtype)
        return self.o_proj(gated.flatten(-2)), weights


class TokenwiseCoefficients(nn.Module):
    r"""Attention in which each token computes the coefficients of its heads.

    .. math:: y = \operatorname{concat}_h\big(c_0\,V_h + (1 + c_1)\,A_h V_h\big)\, W_O,
              \qquad (c_0, c_1) = x\,w_h

    w starts at zero, which is ordinary attention.

    Args:
        attention: a decoder's attention; its output projection moves into this module.
    """

    def __init__(self, attention: Any, sizes: Sizes) -> None:
        super().__init__()
        self.o_proj: nn.Module = attention.o_proj
        attention.o_proj = nn.Identity()
        self.attention: Any = attention
        self.groups = sizes.heads // sizes.kv_heads
        self.gate = nn.Linear(sizes.width, 2 * sizes.heads, bias=False)
        nn.init.zeros_(self.gate.weight)

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, Any]:
        """As the attention that it wraps."""
        mixed, weights = self.attention(hidden_states=hidden_states, **others)
        c0, c1 = self.gate(hidden_states).float()[..., None].chunk(2, -2)
        mixed = mixed.unflatten(-1, (c0.shape[-2], -1))
        v = self.attention.v_proj(hidden_states).unflatten(-1, (-1, mixed.shape[-1]))
        v = v.repeat_interleave(self.groups, -2)
        y = (mixed + c0 * v + c1 * mixed).to(mixed.dtype)
        return self.o_proj(y.flatten(-2)), weights


class ShiftedKeys(nn.Module):
    r"""Keys with a share of the key before them, :math:`k_i + κ_h\,k_{i-1}`, before RoPE.

    κ is learned for each head of keys and starts at zero. In a packed row the first token of a
    document sees the last key of the document before it.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.kappa = nn.Parameter(torch.zeros(heads))

    def forward(self, k: Tensor) -> Tensor:
        """``(batch, tokens, heads, head_dim)`` to the same."""
        before = nn.functional.pad(k, (0, 0, 0, 0, 1, 0))[:, :-1]
        return (k + self.kappa[:, None] * before).to(k.dtype)


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
