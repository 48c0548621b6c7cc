"""Threads, memory, and attention that another library has replaced."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gfsa
from gfsa.functional import which_backend
from gfsa.operators import AttentionOperator, call
from gfsa.plugs import optim
from support.subjects import SUBJECTS, first

THREADS, CALLS = 6, 5


@pytest.mark.parametrize("name", SUBJECTS)
def test_concurrent_inference(name: str) -> None:
    """From the very first forward on, which is also the one that is watched."""
    subject = SUBJECTS[name]
    batches = [subject.inputs(2, 4 + number) for number in range(THREADS)]
    reference, model = subject.plugged(), subject.plugged()
    with torch.no_grad():
        expected = [first(reference(**batch)) for batch in batches]
    found = in_threads(lambda number: [first(model(**batches[number])) for _ in range(CALLS)])
    for mine, right in zip(found, expected, strict=True):
        assert all(torch.equal(output, right) for output in mine)


def in_threads(work: Any) -> list[list[Tensor]]:
    """``work(number)`` in as many threads, all at once, each without gradients."""
    results: list[Any] = [None] * THREADS
    start = threading.Barrier(THREADS)

    def run(number: int) -> None:
        try:
            start.wait()
            with torch.no_grad():
                results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


MODELS = [name for name in SUBJECTS if name != "op"]


@pytest.mark.parametrize(
    "name", ["op", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS)]
)
def test_memory_over_a_thousand_steps(name: str) -> None:
    subject = SUBJECTS[name]
    model, inputs = subject.plugged(), subject.inputs(2, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            first(model(**inputs)).square().mean().backward()
            optimizer.step()

    steps(100)
    tensors, growth = living_tensors(), []
    for _ in range(3):
        resident = resident_bytes()
        steps(400)
        # fewer is what other tests of this process let go in the meantime
        assert living_tensors() <= tensors
        growth.append(resident_bytes() - resident)
    # the allocator has its ups and downs, more so after other tests: a leak grows every time, and
    # of 10 kB a step, which is no tensor of these, it would be more
    assert min(growth) < 4 * 2**20


def test_plugging_again_and_again_leaves_nothing_behind() -> None:
    model: nn.Module = SUBJECTS["BERT"].build()
    inputs = SUBJECTS["BERT"].inputs(1, 4)

    def turns(count: int) -> None:
        for _ in range(count):
            gfsa.plug(model)
            with torch.no_grad():
                model(**inputs)
            gfsa.prune(model, tolerance=1.0).undo()
            gfsa.unplug(model)

    turns(3)
    tensors = living_tensors()
    turns(20)
    assert living_tensors() <= tensors


def living_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


Q, K, V = torch.randn(3, 1, 4, 6, 8).unbind()
COEFFS = torch.randn(4, 3)


@pytest.fixture
def elsewhere() -> Iterator[list[int]]:
    """Counts the calls that go to the function in torch's place."""
    calls, real = [0], F.scaled_dot_product_attention

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        return real(*args, **kwargs)

    with mock.patch.object(F, "scaled_dot_product_attention", replaced):
        yield calls


def test_every_pass_goes_there(elsewhere: list[int]) -> None:
    y = gfsa.graph_filter_attention(Q, K, V, COEFFS)
    assert elsewhere == [2]
    assert torch.isfinite(y).all()
    found = which_backend(Q, K, V, COEFFS)
    assert found.backend == "sdpa"
    assert "replaced" in found.reason
    # what needs another implementation is refused
    for backend in ("dense", "fused"):
        with pytest.raises(ValueError, match="torch's attention is replaced"):
            gfsa.graph_filter_attention(Q, K, V, COEFFS, backend=backend)  # type: ignore[arg-type]
    operator = AttentionOperator(Q, K, dropout_p=0.1, dropout_after="filter")
    with pytest.raises(ValueError, match="and sdpa cannot serve it"):
        operator.polynomial(COEFFS, V)


def test_it_is_noticed_by_whoever_imports_gfsa_afterwards(elsewhere: list[int]) -> None:
    spec = importlib.util.spec_from_file_location("call_again", call.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {spec.name: again}):
        spec.loader.exec_module(again)
    assert "replaced" in again.AttentionCall(Q, K).reason_for_torch_alone()


def test_a_model_can_be_plugged_while_another_one_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of every optimizer look at all plugged models."""
    models = [nn.Identity() for _ in range(300)]
    # those that need no further look
    done = WeakKeyDictionary(dict.fromkeys(models, (optim._STEPS, 0)))
    monkeypatch.setattr(optim, "_WATCHED", done)
    stop, errors = threading.Event(), []

    def train() -> None:
        while not (stop.is_set() or errors):
            try:
                optim._look_at(torch.optim.SGD([torch.zeros(1)]), (), {})
            except RuntimeError as error:
                errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(2000):
            models.append(nn.Identity())
            done[models[-1]] = (optim._STEPS, 0)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors
