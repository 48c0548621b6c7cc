"""Plugged models serve many threads at once, and a thousand steps cost no more memory than ten."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gfsa
from support.matrix import Matrix
from support.random_filters import randomise
from support.subjects import SUBJECTS, first
from support.zoo import VOCABULARY, ZOO

THREADS, CALLS = 6, 5


@pytest.mark.parametrize("name", SUBJECTS)
def test_concurrent_inference(name: str, matrix: Matrix) -> None:
    """From the very first forward on, which is also the one that is watched."""
    subject = SUBJECTS[name]
    batches = [subject.inputs(2, 4 + number) for number in range(THREADS)]
    reference, model = subject.plugged(), subject.plugged()
    with torch.no_grad():
        expected = [first(reference(**batch)) for batch in batches]
    found = in_threads(lambda number: [first(model(**batches[number])) for _ in range(CALLS)])
    for mine, right in zip(found, expected, strict=True):
        assert all(torch.equal(output, right) for output in mine)
    matrix("threads", name)


def test_concurrent_generation() -> None:
    """Each call has a cache of its own, with the powers of its own past."""
    model = ZOO["gpt2"].model("sdpa").float()
    gfsa.plug(model)
    randomise(model)
    prompts = [torch.randint(3, VOCABULARY, (1, 3 + number)) for number in range(THREADS)]

    def generate(number: int) -> list[Tensor]:
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        return [model.generate(prompts[number], **options)]

    expected = [generate(number)[0] for number in range(THREADS)]
    for mine, right in zip(in_threads(generate), expected, strict=True):
        assert torch.equal(mine[0], right)


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
def test_memory_over_a_thousand_steps(name: str, matrix: Matrix) -> None:
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
        steps(1000)
        # fewer is what other tests of this process let go in the meantime
        assert living_tensors() <= tensors
        growth.append(resident_bytes() - resident)
    # the allocator has its ups and downs, more so after other tests: a leak grows every time, and
    # of 5 kB a step, which is no tensor of these, it would be more
    assert min(growth) < 4 * 2**20
    matrix("memory", name)


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
