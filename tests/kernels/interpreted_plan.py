"""The plan of the causal sweep with spans on the CPU, in Triton's interpreter.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gfsa.kernels.sweep import NUMBERS, plan_blocks
from gfsa.operators import Visibility
from support.sweep_plan import HALF, ROWS, plan_of

assert support.triton_interpreter

POLLED = 32


def seen(*rows: Sequence[int], window: int | None = None) -> torch.Tensor:
    numbers = [np.repeat(range(len(row)), row) for row in rows]
    documents = torch.from_numpy(np.stack(numbers))[:, None]
    visible = Visibility(causal=True, window=window, documents=documents, in_order=True)
    return visible.spans(sum(rows[0]), torch.device("cpu"))


def out_of_order() -> torch.Tensor:
    numbers = torch.tensor([3] * 100 + [1] * 250 + [2] * 250)[None, None]
    visible = Visibility(causal=True, documents=numbers, in_order=True)
    return visible.spans(600, torch.device("cpu"))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "spans",
    [
        # edges in the first window, in the middle's, where windows begin, and none
        seen([50, 300, 1, 1, 127, 128, 700, 129, 40], [1476]),
        seen([128] * 10, [1280], [1] * 500 + [780]),
        seen([700, 300, 280], window=200),
        seen([300], window=1),
        seen([1]),
        out_of_order(),
    ],
    ids=["mixed", "even", "window", "alone", "one", "out of order"],
)
def test_it_is_that_of_the_specification(spans: torch.Tensor, parts: int) -> None:
    batch, _, n = spans.shape
    blocks = -(-n // ROWS)
    numbers, row_flags = NUMBERS.value, 3 * blocks * 2
    size = (batch, blocks + 1, 2, numbers)
    flags = torch.full((batch * row_flags + POLLED + batch * (2 * blocks + 2) * 11,), -1)
    flags = flags.to(torch.int32)
    constants = (ROWS, HALF, parts * HALF, POLLED, 4, 64)
    plan_blocks[batch,](spans, flags, n, blocks, row_flags, 2 * n, *constants)
    zeros, plans = flags.split([batch * row_flags + POLLED, batch * (2 * blocks + 2) * 11])
    assert not zeros.any()
    got = plans[: np.prod(size)].view(size).numpy()
    for row, of_row in zip(spans.numpy(), got, strict=True):
        expected = plan_of(row, parts)
        there = expected[..., 2:3] > 0
        np.testing.assert_array_equal(of_row[..., 2], expected[..., 2])
        np.testing.assert_array_equal(of_row * there, expected * there)
