"""Random generators: seeded together, saved and restored together."""

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
def drawing_apart(seed: int) -> Iterator[None]:
    """Inside, this host's generators are seeded anew; afterwards they are as they were."""
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
    """The state of every generator of this process."""
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
