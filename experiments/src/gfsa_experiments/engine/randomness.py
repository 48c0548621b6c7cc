"""The random generators of Python, numpy and torch: seeded, saved and restored together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def isolated_generators(seed: int) -> Iterator[None]:
    """Seed the CPU's generators inside the block; afterwards they have their old state."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])


def save_randomness(path: Path) -> None:
    """Save the state of every generator of this process.

    accelerate's ``save_state`` saves them too, but its ``load_state`` ignores a file that it cannot
    read, and the run would go on with other random numbers: so this state has a file of its own.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    torch.save(
        {
            "python": random.getstate(),
            "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
            "torch": torch.random.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        },
        path,
    )


def load_randomness(path: Path) -> None:
    state = torch.load(path, map_location="cpu", weights_only=True)
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.random.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
