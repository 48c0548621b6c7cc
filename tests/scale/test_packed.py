"""Packed and jagged sequences: each gives the result that it gives alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gfsa
from support.subjects import DIM, HEADS
from support.zoo import VOCABULARY, ZOO, randomise

LENGTHS = (5, 3, 7)


def plugged(name: str, implementation: str = "sdpa") -> Any:
    model = ZOO[name].model(implementation).double()
    gfsa.plug(model)
    randomise(model)
    return model


def sentences() -> list[Tensor]:
    return [torch.randint(3, VOCABULARY, (1, n)) for n in LENGTHS]


def block_diagonal(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """``(N, N)``, True within a sequence: what cumulative lengths say."""
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return owner[:, None] == owner[None, :]


class TestPacked:
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
    @torch.no_grad()
    def test_decoders_as_the_collator_packs_them(self, name: str, implementation: str) -> None:
        """transformers makes the block-diagonal mask from positions that start anew.

        It does so where no cache is handed along: ``use_cache=False``, plugged or not.
        """
        model, texts = plugged(name, implementation), sentences()
        packed = transformers.DataCollatorWithFlattening()(
            [{"input_ids": text[0].tolist(), "labels": text[0].tolist()} for text in texts]
        )
        assert packed["input_ids"].shape == (1, sum(LENGTHS))
        together = model(
            input_ids=packed["input_ids"], position_ids=packed["position_ids"], use_cache=False
        )[0]
        alone = torch.cat([model(input_ids=text, use_cache=False)[0] for text in texts], 1)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @torch.no_grad()
    def test_encoders_with_a_block_diagonal_mask(self, implementation: str) -> None:
        """For encoders transformers makes no such mask: it is given."""
        model, texts = plugged("bert", implementation), sentences()
        allowed = block_diagonal()[None, None]
        mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
        together = model(
            input_ids=torch.cat(texts, 1),
            position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None],
            attention_mask=allowed if implementation == "sdpa" else mask,
        )[0]
        alone = torch.cat([model(input_ids=text)[0] for text in texts], 1)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


def jagged(parts: list[Tensor], offsets: Tensor | None = None) -> Tensor:
    """``(B, H, j, D)`` from ``(n, H, D)`` each."""
    if offsets is None:
        offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    nested = torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)
    return nested.transpose(1, 2)


def ragged_qkv() -> tuple[list[list[Tensor]], list[Tensor]]:
    parts = [[torch.randn(n, HEADS, DIM, dtype=torch.float64) for n in LENGTHS] for _ in range(3)]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    return parts, [jagged(part, offsets) for part in parts]


class TestJagged:
    def test_the_operator(self) -> None:
        parts, _ = ragged_qkv()
        leaves = [torch.cat(part).requires_grad_() for part in parts]
        coeffs = torch.randn(HEADS, 4, dtype=torch.float64, requires_grad=True)
        offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(leaf, offsets).transpose(1, 2) for leaf in leaves
        )
        y = gfsa.graph_filter_attention(q, k, v, coeffs)
        assert y.is_nested
        assert y.layout == torch.jagged
        assert y.shape == q.shape
        together = torch.cat(list(y.transpose(1, 2).unbind()))
        alone = torch.cat(
            [
                gfsa.graph_filter_attention(*(x.transpose(0, 1) for x in part), coeffs).transpose(
                    0, 1
                )
                for part in zip(*(leaf.split(LENGTHS) for leaf in leaves), strict=True)
            ]
        )
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
        weights, inputs = torch.randn_like(alone), (*leaves, coeffs)
        for ours, theirs in zip(
            torch.autograd.grad((together * weights).sum(), inputs),
            torch.autograd.grad((alone * weights).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
    @torch.no_grad()
    def test_multihead_attention(self, layout: torch.layout) -> None:
        model = nn.MultiheadAttention(32, HEADS, batch_first=True).double().eval()
        gfsa.plug(model)
        randomise(model)
        parts = [torch.randn(n, 32, dtype=torch.float64) for n in LENGTHS]
        x = torch.nested.nested_tensor(parts, layout=layout)
        y, _ = model(x, x, x, need_weights=False)
        assert y.layout == layout
        for found, part in zip(y.unbind(), parts, strict=True):
            alone, _ = model(part, part, part, need_weights=False)
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)

    def test_torch_has_no_causal_jagged_attention_on_a_cpu(self) -> None:
        _, (q, k, v) = ragged_qkv()
        for attention in (
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda: gfsa.graph_filter_attention(q, k, v, torch.ones(3), is_causal=True),
        ):
            with (
                sdpa_kernel(SDPBackend.MATH),
                pytest.raises(RuntimeError, match="No viable backend"),
            ):
                attention()

    def test_what_is_refused(self) -> None:
        _, (q, k, v) = ragged_qkv()
        coeffs = torch.randn(HEADS, 3)
        whole = torch.randn(3, HEADS, 7, DIM, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"neither attn_mask .* nor enable_gqa"):
            gfsa.graph_filter_attention(q, k, v, coeffs, enable_gqa=True)
        with pytest.raises(ValueError, match="only torch's attention knows"):
            gfsa.graph_filter_attention(q, k, v, coeffs, backend="dense")
        with pytest.raises(ValueError, match="must be jagged"):
            gfsa.graph_filter_attention(q, q, torch.nested.nested_tensor(list(whole)), coeffs)
        # lengths that look the same are not known to be: other offsets, another ragged axis
        other = jagged([torch.randn(n, HEADS, DIM, dtype=torch.float64) for n in LENGTHS])
        with pytest.raises(ValueError, match="attend to"):
            gfsa.graph_filter_attention(q, other, other, coeffs)
