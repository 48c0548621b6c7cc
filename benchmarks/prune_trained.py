"""Prunes a trained model as far as its logits stay within a bound.

    gfsa train glue --method gfsa --set save_model=true …
    python benchmarks/prune_trained.py runs/glue/…/seed-0 --data-dir data

Prints how many second passes can be left out and the time this saves, on the first batches of the
test split; the tolerance is chosen on those of valid.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

import gfsa
from gfsa.environment import commit, device_name
from gfsa_experiments.engine.batches import evaluation_loader, in_order
from gfsa_experiments.engine.nested import tensors_of, to_device
from gfsa_experiments.engine.task import Task
from gfsa_experiments.runs.load_run import trained_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run with model.pt in it")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--bound", type=float, default=1e-3, help="largest change of a logit")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = trained_task(arguments.run, arguments.data_dir, device)
    size = arguments.batch_size
    # the tolerance is chosen on one split and measured on another
    tolerance = largest_tolerance(
        task, some_batches(task, "valid", arguments.batches, size, device), arguments.bound
    )
    batches = some_batches(task, "test", arguments.batches, size, device)
    pruned = copy.deepcopy(task.model)
    report = gfsa.prune(pruned, tolerance)
    change = largest_change(task, task.model, pruned, batches)
    plain = copy.deepcopy(task.model)
    gfsa.unplug(plain)
    print(report)
    print(f"largest change of a logit: {change:.2e} (bound {arguments.bound:g}, float32)")
    print(f"{device_name(device)}, torch {torch.__version__}, commit {commit()}")
    models = {"plugged": task.model, "pruned": pruned, "unplugged": plain}
    for precision in (torch.float32, torch.bfloat16):
        times = time_each(task, models, batches, arguments.rounds, precision)
        shown = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in times.items())
        print(f"a batch of {arguments.batch_size}, {precision}: {shown}")


def some_batches(
    task: Task, split_name: str, count: int, size: int, device: torch.device
) -> list[Any]:
    split = task.splits[split_name]
    loader = evaluation_loader(split, in_order(min(len(split), count * size), size))
    return [to_device(batch, device) for batch in loader]


@torch.no_grad()
def largest_change(task: Task, model: nn.Module, other: nn.Module, batches: list[Any]) -> float:
    """Over every logit of every batch, in float32."""
    changes = [
        float((a.double() - b.double()).abs().max())
        for batch in batches
        for a, b in zip(logits(model, batch), logits(other, batch), strict=True)
    ]
    return max(changes)


def logits(model: nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return [t for t in tensors_of(dict(model(**inputs))) if t.is_floating_point()]


def largest_tolerance(task: Task, batches: list[Any], bound: float) -> float:
    """Bisection over the heads' high-order coefficients, the only places where pruning changes."""
    steps = sorted(
        {0.0}
        | {
            float(size)
            for f in gfsa.filters_of(task.model).values()
            for size in f.coefficients().detach().double()[:, 2:].abs().sum(-1)
        }
    )
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high + 1) // 2
        pruned = copy.deepcopy(task.model)
        gfsa.prune(pruned, steps[middle] * (1 + 1e-9))
        if largest_change(task, task.model, pruned, batches) < bound:
            low = middle
        else:
            high = middle - 1
    return steps[low] * (1 + 1e-9)


@torch.no_grad()
def time_each(
    task: Task,
    models: dict[str, nn.Module],
    batches: list[Any],
    rounds: int,
    precision: torch.dtype,
) -> dict[str, float]:
    """Median seconds per batch, the models in turn."""
    on_gpu = next(iter(models.values())).parameters().__next__().is_cuda
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(rounds + 3):
        for name, model in models.items():
            if on_gpu:
                torch.cuda.synchronize()
            begun = perf_counter()
            with torch.autocast(
                "cuda" if on_gpu else "cpu", precision, enabled=precision != torch.float32
            ):
                for batch in batches:
                    logits(model, batch)
            if on_gpu:
                torch.cuda.synchronize()
            if round_ >= 3:
                seconds[name].append((perf_counter() - begun) / len(batches))
    return {name: median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
