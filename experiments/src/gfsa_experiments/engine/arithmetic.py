"""The arithmetic of one run: deterministic algorithms, and TF32."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from gfsa_experiments.engine.config import TrainConfig


@contextlib.contextmanager
def arithmetic_of(config: TrainConfig) -> Iterator[None]:
    """Torch's deterministic algorithms and TF32, if the settings want them, for one run."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    if config.deterministic:
        # cuBLAS reads this when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if config.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])
