"""Verifying a path runs no forward twice: counters, running means, caches and random numbers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

import gfsa
from support.plugging import disturb
from support.written_attention import DIM, HEADS, N, WrittenAttention, X


class Remembers(WrittenAttention):
    """Counts its forwards in an object of the caller's and by batch norm, on one of two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x, calls=None):
        if calls is not None:
            calls["forward"] += 1
        x = self.norm(x.mT).mT
        return super().forward(x * 1.0 if len(x) > 2 else x)


def test_no_forward_that_changes_something_is_run_twice():
    attention, calls = Remembers(), Counter()
    model = nn.ModuleDict({"attention": attention})
    gfsa.plug(model, unknown="trace")
    for batch in (3, 2, 3, 1):
        # the second batch takes a new path
        attention(torch.randn(batch, N, DIM))
    assert attention.norm.num_batches_tracked == 4
    attention.eval()
    for batch in (3, 2, 5):
        attention(torch.randn(batch, N, DIM), calls)
    assert calls["forward"] == 3


def test_a_cache_has_the_keys_once_on_a_new_path():
    """MPT: forwards without a cache, then one with a cache, which takes a path of its own."""
    config = hf.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=64, expansion_ratio=2)
    torch.manual_seed(0)
    model = hf.MptForCausalLM(config).eval().double()
    gfsa.plug(model)
    disturb(model)
    ids = torch.randint(3, 64, (2, 9))
    with torch.no_grad():
        without = model(ids, use_cache=False)
        cached = model(ids, use_cache=True)
    assert cached.past_key_values.get_seq_length() == ids.shape[1]
    torch.testing.assert_close(cached.logits, without.logits)


class OwnState(WrittenAttention):
    """Counts its forwards, and keeps a running mean of its inputs in training."""

    def __init__(self, buffer: bool = True) -> None:
        super().__init__()
        self.calls = 0
        if buffer:
            self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x, scale=None, chunk=None):
        self.calls += 1
        if self.training and hasattr(self, "mean"):
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        if self.training:
            x = F.dropout(x, 0.1)
        if scale is not None:
            x = x * scale
        return super().forward(x if chunk is None else torch.cat(x.split(chunk, 1), 1))


def test_training_after_evaluation_draws_random_numbers_once():
    module = OwnState(buffer=False).eval()
    gfsa.plug(module, unknown="trace")
    plain = OwnState(buffer=False)
    drawn = []
    module(X)
    for attention in (plain, module):
        torch.manual_seed(0)
        attention.train()(X)
        drawn.append(torch.rand(1))
    assert torch.equal(*drawn)
    assert module.calls == 2


@pytest.mark.parametrize("batch", [1, HEADS])
def test_a_batch_that_shows_no_layout_runs_once(batch):
    module = OwnState().eval()
    gfsa.plug(module, unknown="trace")
    module(X)
    module.calls = 0
    x = torch.randn(batch, N, DIM)
    for scale in (2.0, 2.0, 2.0):
        module(x, scale)
    assert module.calls == 3
    for _ in range(4):
        module(x, None, 4)
    assert module.calls == 7
