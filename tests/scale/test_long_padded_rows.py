"""Long causal rows with padding, forward and backward: no mask of all queries and keys.

At 32,768 tokens a bool tensor of n×n entries is 1 GiB. The GPU tests have two heads, and bound the
peak by half of one such tensor: a quarter of what a mask for each head would take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gfsa
from gfsa.operators import blocked
from support.measuring import LargestTensor
from support.zoo import randomise

HEADS = 2
COEFFS = (0.3, 0.9, -0.4)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def tokens(length: int, head_dim: int, **make: Any) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v and coefficients that are differentiated, y's gradient, and which keys are seen."""
    torch.manual_seed(0)
    shape = (1, HEADS, length, head_dim)
    *inputs, g = (torch.randn(shape, **make) for _ in range(4))
    keys = torch.ones(1, 1, 1, length, dtype=torch.bool, device=g.device)
    # padding in the middle, which all later queries have to leave out, and at the end
    keys[..., length // 32 : length // 16] = False
    keys[..., -length // 32 :] = False
    inputs.append(torch.tensor(COEFFS, device=g.device))
    return [x.requires_grad_() for x in inputs], g, keys


class ByBlocks:
    """The dense map in float64, written out for a block of queries at a time."""

    def __init__(self, q: Tensor, k: Tensor, keys: Tensor, rows: int = 1024) -> None:
        self.q, self.k, self.keys, self.rows = q.detach().double(), k.detach().double(), keys, rows

    def block(self, start: int) -> Tensor:
        q = self.q[:, :, start : start + self.rows]
        scores = q @ self.k.mT * q.shape[-1] ** -0.5
        place = torch.arange(self.k.shape[2], device=q.device)
        seen = self.keys & (place[start : start + self.rows, None] >= place)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1)

    def starts(self) -> range:
        return range(0, self.q.shape[2], self.rows)

    def apply(self, x: Tensor) -> Tensor:
        return torch.cat([self.block(start) @ x for start in self.starts()], 2)

    def transposed(self, x: Tensor) -> Tensor:
        parts = (self.block(at).mT @ x[:, :, at : at + self.rows] for at in self.starts())
        return sum(parts, torch.zeros_like(x))


def error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm())


def step(inputs: list[Tensor], keys: Tensor, g: Tensor) -> list[Tensor]:
    y = gfsa.graph_filter_attention(*inputs, keys, is_causal=True)
    return [y.detach(), *torch.autograd.grad(y, inputs, g)]


def check(inputs: list[Tensor], g: Tensor, keys: Tensor, found: list[Tensor], most: float) -> None:
    """The last rows of y, which see the most keys, and the values' gradient, against dense."""
    q, k, v, _ = inputs
    exact = ByBlocks(q, k, keys)
    c0, c1, c2 = COEFFS
    v, g = v.detach().double(), g.double()
    u = exact.apply(v)
    last = exact.starts()[-1]
    y = c0 * v[:, :, last:] + c1 * u[:, :, last:] + c2 * (exact.block(last) @ u)
    assert error(found[0][:, :, last:], y) < most
    back = exact.transposed(g)
    assert error(found[3], c0 * g + c1 * back + c2 * exact.transposed(back)) < most
    assert all(x.isfinite().all() for x in found)


def llama(head_dim: int) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=HEADS * head_dim,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    gfsa.plug(model, K=3)
    randomise(model)
    return model


def padded(length: int, padding: int) -> dict[str, Tensor]:
    """Two rows, the second with padding on the left, as prompts have it."""
    ids = torch.randint(16, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def trained(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Logits, after the gradients of all weights have been made."""
    model.zero_grad()
    logits: Tensor = model(**batch, use_cache=False).logits
    logits.float().square().mean().backward()
    filters = gfsa.filters_of(model).values()
    assert all(bool(x.grad.isfinite().all()) for each in filters for x in each.parameters())
    return logits.detach()


def compare_first_tokens(
    head_dim: int, batch: dict[str, Tensor], padding: int, logits: Tensor, most: float
) -> None:
    """Tokens see no later ones, and no padding: a dense model in float64 is given 1,024 alone.

    Positions of Llama are relative, so they may begin with zero after padding, too.
    """
    exact = llama(head_dim).to(logits.device, logits.dtype).double()
    exact.set_attn_implementation("eager")
    for row, start in ((0, 0), (1, padding)):
        part = slice(start, start + 1024)
        with torch.no_grad():
            wanted = exact(batch["input_ids"][row : row + 1, part], use_cache=False).logits
        assert error(logits[row : row + 1, part], wanted) < most


def peak(work: Callable[[], Any]) -> int:
    """Bytes that a call takes on the GPU beyond what there is; after one that compiles."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    taken = torch.cuda.max_memory_allocated() - before
    print(f"{taken / 2**20:.0f} MiB")
    return taken


def test_padding_makes_no_tensor_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    length, head_dim = 2048, 64
    # at its own number all of these queries would be one block
    monkeypatch.setattr(blocked, "MOST_ENTRIES", 128 * length)
    inputs, g, keys = tokens(length, head_dim)
    with LargestTensor() as largest:
        found = step(inputs, keys, g)
    # the largest are the tokens of all heads in float32
    assert largest.bytes <= 4 * HEADS * length * head_dim < length * length / 2
    check(inputs, g, keys, found, 1e-5)


def test_an_attention_mask_makes_no_tensor_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    length, padding = 2048, 500
    monkeypatch.setattr(blocked, "MOST_ENTRIES", 128 * length)
    model, batch = llama(64), padded(length, padding)
    with LargestTensor() as largest:
        logits = trained(model, batch)
    # of both rows: tokens of all heads in float32
    assert largest.bytes <= 2 * 4 * HEADS * length * 64 < length * length
    compare_first_tokens(64, batch, padding, logits, 1e-5)


@gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_32k_tokens_with_padding_fit_on_a_gpu(head_dim: int) -> None:
    length = 32768
    inputs, g, keys = tokens(length, head_dim, device="cuda", dtype=torch.bfloat16)
    found: list[Tensor] = []

    def work() -> None:
        found[:] = step(inputs, keys, g)

    assert peak(work) < length * length / 2
    check(inputs, g, keys, found, 0.02)


@gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_32k_tokens_with_an_attention_mask_fit_on_a_gpu(head_dim: int) -> None:
    length, padding = 32768, 1000
    model = llama(head_dim).to("cuda", torch.bfloat16)
    batch = {name: x.cuda() for name, x in padded(length, padding).items()}
    logits: list[Tensor] = []

    def work() -> None:
        logits[:] = [trained(model, batch)]

    # two rows
    assert peak(work) < length * length
    compare_first_tokens(head_dim, batch, padding, logits[0], 0.05)
