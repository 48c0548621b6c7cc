"""A thousand corrupted filter files: each is refused, or loads as exactly what it says.

Each within 1 s and 200 MB of the memory that was in use before. ``make fuzz`` tries more of them:
``GFSA_FUZZ=20000 pytest tests/scale/test_corrupted_filters.py``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import gfsa
from gfsa.filters.partial import PartialPolynomial
from gfsa.plugs.saving.files import FILE
from support.corrupted_filters import corrupted, parts_of
from support.tiny import TinyEncoder

COUNT = int(os.environ.get("GFSA_FUZZ", "1000"))
MOST_BYTES = 200 * 10**6
MOST_SECONDS = 1.0

SAVED: dict[str, Callable[[int], gfsa.GraphFilter]] = {
    "gfsa": lambda heads: gfsa.GFSA(heads, w0=0.25, wK=[0.1, 0.2, 0.3, 0.4]),
    "exact": lambda heads: gfsa.GFSA(heads, K=4, power="exact", learn=("wK",), w0=[1.0, 2, 3, 4]),
    "polynomial": lambda heads: gfsa.Polynomial(heads, degree=3, lr_multiplier=2.0),
    "pagerank": lambda heads: gfsa.PageRank(heads, alpha=0.2, hops=3),
    "pruned": lambda heads: PartialPolynomial(heads, 2, [0, 2]),
}
KINDS = {
    kind.__name__: kind
    for kind in (
        *(gfsa.GFSA, gfsa.Polynomial, gfsa.Twicing, gfsa.Laplacian, gfsa.PageRank),
        PartialPolynomial,
    )
}


def build() -> nn.Module:
    return TinyEncoder(depth=2, dim=8, heads=4)


@pytest.fixture(autouse=True)
def _without_garbage() -> None:
    """What earlier tests left would make room, were it collected within the limit."""
    gc.collect()


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Inside, an allocation beyond the limit fails instead of being served."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def state_of(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def try_to_load(model: nn.Module, folder: Path) -> bool:
    """Whether the folder loads; if not, with a documented error and the model as it was."""
    before = state_of(model)
    message = None
    start = time.process_time()
    try:
        with limited_memory():
            gfsa.load(model, folder)
    except ValueError as error:
        message = str(error)
    assert time.process_time() - start < MOST_SECONDS
    if message is not None:
        assert 0 < len(message) < 3000
        assert state_of(model) == before
    return message is None


def check_exact(model: nn.Module, file: bytes) -> None:
    """The model's filters are what the file says, to the bit."""
    content = json.loads(parts_of(file)[0]["__metadata__"]["gfsa"])
    numbers = safetensors.torch.load(file)
    filters = gfsa.filters_of(model)
    assert filters.keys() == content["filters"].keys()
    for name, entry in content["filters"].items():
        filter = filters[name]
        assert type(filter) is KINDS[entry["kind"]]
        assert filter.config() == KINDS[entry["kind"]](**entry["arguments"]).config()
        assert filter.dropout_after == entry.get("dropout_after", "attention")
        assert filter.coefficients().isfinite().all()
        own = {key: value for key, value in filter.state_dict().items() if key != "_extra_state"}
        for key, value in own.items():
            assert torch.equal(value, numbers.pop(f"{name}.{key}").to(value.dtype))
    assert not numbers


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The file of a save of each kind."""
    found = []
    for kind, factory in SAVED.items():
        folder = tmp_path_factory.mktemp(kind)
        model = build()
        gfsa.plug(model, filter=factory)
        gfsa.save(model, folder)
        found.append((folder / FILE).read_bytes())
    return found


def test_refused_or_exact(saves: list[bytes], tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for number in range(COUNT):
        file = corrupted(saves[number % len(saves)], number)
        (tmp_path / FILE).write_bytes(file)
        model = build()
        if number % 3 == 0:
            # a model that is plugged already, with other numbers
            gfsa.plug(model, filter=SAVED[list(SAVED)[number % len(saves)]])
            with torch.no_grad():
                for filter in gfsa.filters_of(model).values():
                    for parameter in filter.parameters():
                        parameter.add_(1.0)
        try:
            if not try_to_load(model, tmp_path):
                outcomes["refused"] += 1
                continue
            check_exact(model, file)
            outcomes["what it says"] += 1
        except BaseException as error:
            raise AssertionError(f"file {number}: {error!r:.500}") from error
    print(dict(outcomes))
    assert outcomes.total() == COUNT
    # the files are worth trying only if some get past all checks
    assert outcomes["refused"] > 0.6 * COUNT
    assert outcomes["what it says"] > 0.01 * COUNT
