"""The decoders: Qwen3 in any size with its variants, GPT-2, and one of bytes for torch alone.

Beside them their loss, and :func:`probe`: what a trained one can copy, and how its loss falls along
a row.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa.operators import AttentionOperator, Operator
from gfsa_experiments.data.pretrained import load, load_model
from gfsa_experiments.models.attention import SoftmaxAttention
from gfsa_experiments.tasks.pretrain.data import TokenRows

if TYPE_CHECKING:
    from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig


IGNORED = -100


class NextTokenLoss:
    """What transformers calls as a model's ``loss_function``: the mean of −log p(next token).

    ``labels[i]`` is what position i predicts: they are shifted already. If ``compiled``, the logits
    are read on a GPU in the precision they come in, once forward and once backward.
    """

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled

    def __call__(self, logits: Tensor, labels: Tensor, **unused: Any) -> Tensor:
        alone = not torch.compiler.is_compiling()
        function = _compiled() if self.compiled and alone and logits.is_cuda else cross_entropy
        return function(logits, labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Over every label that is not ignored."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(cross_entropy, dynamic=False)


def build_decoder(config: PretrainConfig, vocabulary: int, end: int | None = None) -> Any:
    """A new Qwen3: RMSNorm, RoPE, SwiGLU, no biases, no dropout.

    ``config`` has a number for every size (:meth:`PretrainConfig.whole`); documents begin with the
    token ``end``.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes: Any = config
    qwen3 = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.depth,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.block,
        tie_word_embeddings=True,
        use_cache=False,
        initializer_range=sizes.init_std,
        bos_token_id=end,
        eos_token_id=end,
    )
    model = AutoModelForCausalLM.from_config(qwen3, attn_implementation="sdpa")
    for layer in model.model.layers:
        attention = layer.self_attn
        if sizes.qk_norm == "none":
            attention.q_norm, attention.k_norm = nn.Identity(), nn.Identity()
        elif sizes.qk_norm != "learned":
            attention.k_norm = HeadNorm(qwen3.rms_norm_eps)
            learned = sizes.heads if sizes.qk_norm == "temperature" else 0
            attention.q_norm = HeadNorm(qwen3.rms_norm_eps, learned)
        if sizes.shift_keys:
            attention.k_norm = nn.Sequential(attention.k_norm, ShiftedKeys(sizes.kv_heads))
        if sizes.gate:
            layer.self_attn = GatedAttention(attention, sizes)
        elif sizes.tokenwise:
            layer.self_attn = TokenwiseCoefficients(attention, sizes)
    if sizes.fast_gates:
        names = [name for name, _ in model.named_parameters() if name.endswith(".gate.weight")]
        # the optimiser asks a model for what it does not decay
        model.no_weight_decay = functools.partial(set, names)
    return model


class _WithGate(nn.Module):
    """Attention around which ``gate``, a map of the layer's input, changes the heads.

    The output projection of ``attention`` moves into this module.
    """

    def __init__(self, attention: Any, width: int, outputs: int) -> None:
        super().__init__()
        self.o_proj: nn.Module = attention.o_proj
        attention.o_proj = nn.Identity()
        self.attention: Any = attention
        self.gate = nn.Linear(width, outputs, bias=False)

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, Any]:
        """As the attention that it wraps."""
        flat, weights = self.attention(hidden_states=hidden_states, **others)
        heads = flat.unflatten(-1, (-1, self.attention.head_dim))
        changed = self.change(heads, self.gate(hidden_states).float()[..., None], hidden_states)
        return self.o_proj(changed.flatten(-2)), weights

    def change(self, heads: Tensor, gates: Tensor, hidden_states: Tensor) -> Tensor:
        """Heads ``(B, N, H, d)`` with gates ``(B, N, outputs, 1)``."""
        raise NotImplementedError


class GatedAttention(_WithGate):
    r"""Attention whose heads are gated by the layer's input, token by token.

    .. math:: y = \operatorname{concat}_h\big(2\,σ(x\,w_h)\;(A_h V_h)\big)\, W_O

    Gated attention has no factor 2; with it, the gates of small random :math:`w_h` begin at one.
    """

    def __init__(self, attention: Any, sizes: Any) -> None:
        super().__init__(attention, sizes.width, sizes.heads)
        nn.init.normal_(self.gate.weight, std=sizes.init_std)

    def change(self, heads: Tensor, gates: Tensor, hidden_states: Tensor) -> Tensor:
        return heads * (2 * torch.sigmoid(gates)).to(heads.dtype)


class TokenwiseCoefficients(_WithGate):
    r"""Attention in which each token computes the coefficients of its heads.

    .. math:: y = \operatorname{concat}_h\big(c_0\,V_h + (1 + c_1)\,A_h V_h\big)\, W_O,
              \qquad (c_0, c_1) = x\,w_h

    w starts at zero, which is ordinary attention.
    """

    def __init__(self, attention: Any, sizes: Any) -> None:
        super().__init__(attention, sizes.width, 2 * sizes.heads)
        self.groups = sizes.heads // sizes.kv_heads
        nn.init.zeros_(self.gate.weight)

    def change(self, heads: Tensor, gates: Tensor, hidden_states: Tensor) -> Tensor:
        c0, c1 = gates.chunk(2, -2)
        v = self.attention.v_proj(hidden_states).unflatten(-1, (-1, heads.shape[-1]))
        v = v.repeat_interleave(self.groups, -2)
        return (heads + c0 * v + c1 * heads).to(heads.dtype)


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

    ``heads`` is how many learned :math:`t_h` there are, one in the beginning; 0 for none.
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


# GPT-2 has the first three
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout")


def pretrained_decoder(name: str, block: int, dropout: float | None) -> Any:
    """A pretrained decoder that takes ``block`` tokens; with ``dropout`` unless it is None."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    sizes = load(AutoConfig, name)
    is_causal = getattr(sizes, "is_decoder", False) or sizes.is_encoder_decoder
    if type(sizes) in MODEL_FOR_MASKED_LM_MAPPING and not is_causal:
        raise ValueError(
            f"{name} is an encoder, which sees the tokens that it would predict; set model= to a "
            "decoder such as gpt2"
        )
    most = getattr(sizes, "max_position_embeddings", block)
    if block > most:
        raise ValueError(f"block {block} is longer than the {most} tokens of {name}")
    if dropout is not None:
        names = [each for each in DROPOUTS if hasattr(sizes, each)]
        if not names:
            raise ValueError(f"{name} has no dropout to be set; set dropout=none")
        for each in names:
            setattr(sizes, each, dropout)
    return load_model(AutoModelForCausalLM, name, config=sizes)


@contextmanager
def causal_by_kernel(model: Any) -> Iterator[None]:
    """Leave causality to the attention kernel, where transformers would build a mask for GPT-2.

    transformers inspects values on the device to decide whether a mask can be left out; while a
    CUDA graph is captured it cannot, and builds the whole N×N mask. It builds none for a body whose
    config names an unknown attention implementation. The attention layers keep the real config and
    are causal by themselves.
    """
    body = getattr(model, "transformer", None)
    config = model.config
    if body is None or config.model_type != "gpt2" or config._attn_implementation != "sdpa":
        yield
        return
    unmasked = copy.copy(config)
    unmasked._attn_implementation_internal = "causal by kernel"
    body.config = unmasked
    try:
        yield
    finally:
        body.config = config


class CausalAttention(SoftmaxAttention):
    r"""Causal attention over normalised, rotated queries and keys, with a temperature per head.

    .. math:: A_h = \mathrm{softmax}_{causal}(t_h\, R\,\hat q_h\,(R\,\hat k_h)^\top / \sqrt d),
              \qquad \hat x = x / \sqrt{\operatorname{mean}(x^2) + ε}

    R rotates by position (RoPE), t is learned and one in the beginning.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, dim: int, num_heads: int, block: int) -> None:
        super().__init__(dim, num_heads)
        half = dim // num_heads // 2
        angles = torch.arange(block)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self.temperature = nn.Parameter(torch.ones(num_heads))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalised and rotated, and values: ``(B, H, N, d)`` each."""
        q, k, v = super().heads(x)
        q, k = (self._rotated(part) for part in (q, k))
        return q * self.temperature[:, None, None], k, v

    def operator(self, q: Tensor, k: Tensor, *graph: Tensor | None) -> Operator:
        # without a filter this is exactly torch's own attention
        if self.plugged is None:
            return AttentionOperator(q, k, is_causal=True, backend="sdpa")
        return AttentionOperator(q, k, is_causal=True)

    def _rotated(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        cosine, sine = self.cosine[: x.shape[-2]], self.sine[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class DecoderBlock(nn.Module):
    """``x ← x + attention(norm(x))``, then the same with an MLP four times as wide."""

    def __init__(self, width: int, heads: int, block: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = CausalAttention(width, heads, block)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        update: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + update


class ByteDecoder(nn.Module):
    """Predicts the next byte, from at most ``block``; the head has the embedding's weights."""

    def __init__(self, depth: int, width: int, heads: int, block: int, init_std: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, block) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=init_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``(B, N, 256)`` for bytes ``(B, N)``."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


# rows at a time: the logits of 8 × 1,024 tokens take half a gigabyte
_BATCH = 8


def probe(
    model: nn.Module, valid: TokenRows, precision: torch.dtype | None, rows: int
) -> dict[str, Any]:
    """Everything that is measured, as plain data; the model is as before afterwards.

    ``induction``: the loss on random tokens, and on the same tokens when they come a second time.
    ``recall``: pairs of random tokens, then the same pairs in another order: the loss on the second
    token of a pair, the first and the second time. ``position``: the loss by octave of the position
    in a row of ``valid``. ``rows`` is how many rows, and how many random sequences; ``precision``
    that of autocast, None for none.
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
