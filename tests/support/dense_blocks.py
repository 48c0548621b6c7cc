"""The comparison methods and the blocks they go into, written out with n×n matrices.

Nothing of the package is used here: formulas as they stand in the papers, wiring as it stands in
the models' own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores.masked_fill(~allowed, -math.inf).softmax(-1)


def mean_map(allowed: Tensor) -> Tensor:
    """M: every query has the same weight for each key that it sees."""
    return allowed.double() / allowed.sum(-1, keepdim=True)


def attnscale(matrix: Tensor, allowed: Tensor, scale: Tensor) -> Tensor:
    """``M + (1+λ)(A − M)``."""
    mean = mean_map(allowed)
    return mean + (1 + scale[:, None, None]) * (matrix - mean)


def featscale(y: Tensor, allowed: Tensor, on_mean: Tensor, on_rest: Tensor) -> Tensor:
    """``y + λ1⊙mean(y) + λ2⊙(y − mean(y))`` on ``(B, N, D)``; allowed is ``(B, N, N)``."""
    mean = mean_map(allowed) @ y
    return y + on_mean * mean + on_rest * (y - mean)


def contranorm(x: Tensor, allowed: Tensor, scale: float, tau: float, form: str) -> Tensor:
    """``(1+s)x − s·softmax(x̂x̂ᵀ/τ)x``, or without the 1+s; allowed is ``(B, N, N)``."""
    unit = x / x.pow(2).sum(-1, keepdim=True).sqrt()
    alike = masked_softmax(unit @ unit.transpose(1, 2) / tau, allowed) @ x
    return ((1 + scale) * x if form == "bert" else x) - scale * alike


@dataclass
class Dense:
    """A method in the terms of one layer; what it does not touch stays as it is.

    Each is called with the layer's number, counted from 0.
    """

    on_map: Callable[[int, Tensor], Tensor] = lambda layer, matrix: matrix
    on_values: Callable[[int, Tensor, Tensor], Tensor] = lambda layer, y, v: y
    on_branch: Callable[[int, str, Tensor], Tensor] = lambda layer, which, y: y
    on_norm: Callable[[int, int, Tensor], Tensor] = lambda layer, which, x: x


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attend(
    method: Dense, layer: int, parts: tuple[Tensor, ...], allowed: Tensor, count: int
) -> Tensor:
    q, k, v = (heads(part, count) for part in parts)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    matrix = method.on_map(layer, masked_softmax(scores, allowed[:, None]))
    return method.on_values(layer, matrix @ v, v).transpose(1, 2).flatten(2)


def bert(model: Any, ids: Tensor, allowed: Tensor, method: Dense) -> Tensor:
    """A post-norm encoder of transformers."""
    x = model.embeddings(ids)
    for number, block in enumerate(model.encoder.layer):
        inner, out = block.attention.self, block.attention.output
        parts = (inner.query(x), inner.key(x), inner.value(x))
        y = out.dense(attend(method, number, parts, allowed, inner.num_attention_heads))
        x = x + method.on_branch(number, "attention", y)
        x = out.LayerNorm(method.on_norm(number, 0, x))
        y = block.output.dense(F.gelu(block.intermediate.dense(x)))
        x = x + method.on_branch(number, "mlp", y)
        x = block.output.LayerNorm(method.on_norm(number, 1, x))
    return x


def gpt2(model: Any, ids: Tensor, allowed: Tensor, method: Dense) -> Tensor:
    """A pre-norm causal decoder of transformers."""
    x = model.wte(ids) + model.wpe(torch.arange(ids.shape[1]))
    for number, block in enumerate(model.h):
        parts = block.attn.c_attn(block.ln_1(method.on_norm(number, 0, x))).chunk(3, -1)
        y = block.attn.c_proj(attend(method, number, parts, allowed, block.attn.num_heads))
        x = x + method.on_branch(number, "attention", y)
        y = block.mlp(block.ln_2(method.on_norm(number, 1, x)))
        x = x + method.on_branch(number, "mlp", y)
    return model.ln_f(x)


def torch_encoder(model: Any, x: Tensor, allowed: Tensor, method: Dense) -> Tensor:
    """``nn.TransformerEncoder`` on ``(B, N, D)``, norms first or last."""
    for number, block in enumerate(model.layers):

        def attention(x: Tensor, block: Any = block, number: int = number) -> Tensor:
            inner = block.self_attn
            packed = F.linear(x, inner.in_proj_weight, inner.in_proj_bias)
            y = attend(method, number, packed.chunk(3, -1), allowed, inner.num_heads)
            return method.on_branch(number, "attention", inner.out_proj(y))

        def mlp(x: Tensor, block: Any = block, number: int = number) -> Tensor:
            y = block.linear2(F.relu(block.linear1(x)))
            return method.on_branch(number, "mlp", y)

        if block.norm_first:
            x = x + attention(block.norm1(method.on_norm(number, 0, x)))
            x = x + mlp(block.norm2(method.on_norm(number, 1, x)))
        else:
            x = block.norm1(method.on_norm(number, 0, x + attention(x)))
            x = block.norm2(method.on_norm(number, 1, x + mlp(x)))
    return x


def vit(model: nn.Module, pixels: Tensor, allowed: Tensor, method: Dense) -> Tensor:
    """timm's ViT and DeiT."""
    m: Any = model
    x = m._pos_embed(m.patch_embed(pixels))
    for number, block in enumerate(m.blocks):
        parts = block.attn.qkv(block.norm1(method.on_norm(number, 0, x))).chunk(3, -1)
        y = block.attn.proj(attend(method, number, parts, allowed, block.attn.num_heads))
        x = x + method.on_branch(number, "attention", y)
        y = block.mlp(block.norm2(method.on_norm(number, 1, x)))
        x = x + method.on_branch(number, "mlp", y)
    return m.forward_head(m.norm(x))
