"""The suites of ``gfsa bench``; a new suite is a function and an entry in ``SUITES``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gfsa.functional import graph_filter_attention, linear_graph_filter_attention, which_backend
from gfsa.kernels.routes import Backend
from gfsa_benchmarks.case import Case, Setting, Shape, Variant, deterministic, variant
from gfsa_benchmarks.decode import decode, decode_static, prefill
from gfsa_benchmarks.pretraining import pretraining_step
from gfsa_benchmarks.published import published_attention
from gfsa_benchmarks.training import training_step


@dataclass(frozen=True)
class Suite:
    """The function that builds a suite's cases, and its default shapes, separated by spaces."""

    build: Callable[[Shape, Setting], Case]
    cpu_shapes: str
    cuda_shapes: str
    compiles: bool = False
    grouped: bool = False
    """Whether shapes may have fewer heads of keys than of queries."""
    drops: bool = False
    """Whether shapes may have dropout."""

    def shapes(self, device: torch.device) -> Sequence[str]:
        return (self.cuda_shapes if device.type == "cuda" else self.cpu_shapes).split()


def operators(shape: Shape, setting: Setting) -> Case:
    """Plain attention, gfsa of degree 1 and 2, and the published form.

    Where fused kernels take the call: these whatever ``auto`` chooses, and sums in a fixed order.
    """
    tokens, mask = _tokens(shape, setting), _mask(shape, setting)
    group = shape.heads // (shape.key_heads or shape.heads)

    def published(q: Tensor, k: Tensor, v: Tensor, w0: Tensor, w1: Tensor, wK: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return published_attention(q, k, v, w0, w1, wK, 3, shape.causal, mask, shape.dropout)

    weights = [
        torch.full((shape.heads,), value, device=setting.device, requires_grad=True)
        for value in (0.1, 0.8, 0.1)
    ]
    variants = [
        _plain(shape, setting, tokens),
        _filtered("gfsa degree 1", 1, "auto", shape, setting, tokens),
        _filtered("gfsa", 2, "auto", shape, setting, tokens),
    ]
    # by torch's attention, which draws one dropout mask twice outside of graphs alone
    if not (shape.dropout and setting.graphs):
        variants.append(_filtered("gfsa sdpa", 2, "sdpa", shape, setting, tokens))
    variants += _by_fused_kernels(shape, setting, tokens)
    return Case(
        str(shape), [*variants, variant("published", "torch", published, (*tokens, *weights))]
    )


def attention(shape: Shape, setting: Setting) -> Case:
    """What each filter costs beside plain attention, by the kernels that ``auto`` chooses."""
    tokens = _tokens(shape, setting)
    variants = [
        _plain(shape, setting, tokens),
        _filtered("degree 2", 2, "auto", shape, setting, tokens),
        _filtered("degree 1", 1, "auto", shape, setting, tokens),
        _filtered("exclusive", 1, "auto", shape, setting, tokens, exclusive=True),
    ]
    return Case(str(shape), variants)


def _plain(shape: Shape, setting: Setting, tokens: Sequence[Tensor]) -> Variant:
    """Torch's attention."""
    mask, causal = _mask(shape, setting), shape.causal
    if mask is not None and causal:
        # torch accepts either a mask or is_causal
        mask, causal = mask & torch.ones(shape.tokens, shape.tokens).tril().to(mask), False

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = shape.key_heads is not None
        return F.scaled_dot_product_attention(
            q, k, v, mask, shape.dropout, causal, enable_gqa=grouped
        )

    return variant("plain", "torch", run, tokens)


def _filtered(
    name: str,
    degree: int,
    backend: Backend,
    shape: Shape,
    setting: Setting,
    tokens: Sequence[Tensor],
    exclusive: bool = False,
) -> Variant:
    coeffs = _coefficients(shape, setting, degree)
    options: dict[str, Any] = {
        "attn_mask": _mask(shape, setting),
        "is_causal": shape.causal,
        "dropout_p": shape.dropout,
        "enable_gqa": shape.key_heads is not None,
        "backend": backend,
    }
    if exclusive:
        # as gfsa.Exclusive: neither coefficients nor shares are learned
        coeffs = torch.tensor([[0.0, 1.0]] * shape.heads, device=setting.device)
        options["exclusive"] = torch.ones(shape.heads, device=setting.device)

    def run(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor = coeffs) -> Tensor:
        return graph_filter_attention(q, k, v, coeffs, **options)

    q, k, v = tokens
    ran = which_backend(q, k, v, coeffs, **options).backend
    return variant(name, ran, run, tokens if exclusive else (*tokens, coeffs))


def _by_fused_kernels(shape: Shape, setting: Setting, tokens: Sequence[Tensor]) -> list[Variant]:
    """Variants for calls that fused kernels take; none for others."""
    try:
        fused = _filtered("gfsa fused", 2, "fused", shape, setting, tokens)
    except ValueError:
        return []
    ordered = _filtered("gfsa deterministic", 2, "fused", shape, setting, tokens)
    return [fused, deterministic(ordered)]


def linear(shape: Shape, setting: Setting) -> Case:
    """Efficient Attention without and with a filter, at doubling lengths."""
    if shape.causal or shape.padded:
        raise ValueError(
            f"the linear suite takes neither causal nor padded shapes, got the shape {shape}"
        )
    q, k, v = _tokens(shape, setting)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)

    def filtered(name: str, degree: int) -> Variant:
        coeffs = _coefficients(shape, setting, degree)
        return variant(name, "linear", linear_graph_filter_attention, (q, k, v, coeffs))

    variants = [variant("plain", "torch", plain, (q, k, v))]
    return Case(str(shape), [*variants, filtered("gfsa", 2), filtered("gfsa degree 10", 10)])


SUITES: dict[str, Suite] = {
    "ops": Suite(
        operators,
        "1x12x1024x64 1x12x256x64 8x6x197x64",
        "1024x6x64x64 32x12x128x64 256x6x197x64 32x12x256x64 32x12x512x64 8x12x1024x64:causal "
        "4x16x4096x64 2x16x8192x128 2x16x8192x128:causal",
        grouped=True,
        drops=True,
    ),
    "attention": Suite(
        attention,
        "1x12x256x64:causal",
        "32x12x128x64 256x6x197x64 32x12x256x64 32x12x512x64 64x12x577x64 16x8x1500x80 "
        "4x16x4096x64 2x16x8192x128 8x12x1024x64:causal 64x8x1024x64:causal 16x16x2048x64:causal "
        "4x16x4096x128:causal 8x32/8x2048x128:causal 4x32/8x4096x128:causal "
        "1x16x32768x128:causal 8x16x2048x96:causal 4x8/4x2048x256:causal 32x12x256x64:causal",
        grouped=True,
    ),
    "models": Suite(
        training_step,
        "2x12x64x64 2x12x64x64:padded 2x12x64x64:causal",
        "32x12x128x64 32x12x128x64:padded 256x6x197x64 8x12x1024x64:causal",
        compiles=True,
    ),
    "pretrain-step": Suite(
        pretraining_step,
        "1x8x128x64:causal",
        "64x8x1024x64:causal 32x12x1024x64:causal",
        compiles=True,
    ),
    "linear": Suite(
        linear, "1x4x4096x64 1x4x8192x64 1x4x16384x64", "4x8x4096x64 4x8x8192x64 4x8x16384x64"
    ),
    "decode": Suite(
        decode,
        "1x12x128x64 1x12x512x64 1x12x1023x64",
        "1x12x512x64 1x12x1023x64 16x12x1023x64",
        grouped=True,
    ),
    "decode-static": Suite(
        decode_static,
        "1x12x128x64 1x12x512x64 1x12x1023x64",
        "1x12x1023x64 16x12x1023x64",
        compiles=True,
        grouped=True,
    ),
    "prefill": Suite(prefill, "1x12x128x64", "1x12x1024x64 16x12x1024x64", grouped=True),
}


def _mask(shape: Shape, setting: Setting) -> Tensor | None:
    """``(B, 1, 1, N)``, True for keys that are not padding; None without padding."""
    return shape.real_tokens()[:, None, None].to(setting.device) if shape.padded else None


def _tokens(shape: Shape, setting: Setting) -> list[Tensor]:
    key_heads = shape.key_heads or shape.heads
    return [
        setting.randn(shape.batch, heads, shape.tokens, shape.dim).requires_grad_()
        for heads in (shape.heads, key_heads, key_heads)
    ]


def _coefficients(shape: Shape, setting: Setting, degree: int) -> Tensor:
    # none is zero, so that no operator can skip a term
    values = torch.full((shape.heads, degree + 1), 0.1)
    values[:, 1] = 0.8
    return values.to(setting.device).requires_grad_()
