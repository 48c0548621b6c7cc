"""The cost of the lens, in processor time, which other processes do not change."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

import gfsa
from gfsa.lens.monitor import Monitor
from support.tiny import TinyEncoder, padded_batch


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def test_watching_every_hundredth_step_costs_less_than_two_percent() -> None:
    model = TinyEncoder(depth=4, dim=64)
    gfsa.plug(model)
    batch = padded_batch([64] * 16, dim=64)
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = Monitor(model, lambda values, step: None, every=100)

    def step(number: int) -> None:
        monitor.before_step(number)
        model(**batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.after_step(number)

    for number in range(3):
        step(number)
    watched, alone = [], []
    for _ in range(15):
        watched.append(seconds(lambda: step(100)))
        alone.append(seconds(lambda: step(101)))
    extra = statistics.median(watched) - statistics.median(alone)
    assert extra / 100 < 0.02 * statistics.median(alone)


@pytest.mark.slow
def test_features_of_a_bert_base_cost_at_most_three_forwards() -> None:
    """12 layers of 12 heads, 512 tokens, batch 8; ``pytest -m slow -s`` prints the figures."""
    import transformers as hf

    torch.set_num_threads(1)
    model = hf.BertModel(hf.BertConfig(), add_pooling_layer=False).eval()
    ids = torch.randint(30000, (8, 512))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def forward() -> None:
        with torch.no_grad():
            model(**batch)

    forward()
    plain = min(seconds(forward) for _ in range(2))
    print(f"\nplain forward {plain:.1f} s")
    ratios = {}
    for name, options in (
        ("features", {"attention": False, "spectral": False}),
        ("features and attention", {"spectral": False}),
        ("everything, 8 samples", {}),
    ):
        taken = seconds(lambda options=options: gfsa.diagnose(model, batch, **options))
        ratios[name] = taken / plain
        print(f"{name}: {taken:.1f} s, {ratios[name]:.2f} forwards")
    assert ratios["features"] <= 3
