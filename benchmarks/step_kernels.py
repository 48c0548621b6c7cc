"""Where the GPU time of a training step of the recipe ``causal_lm`` goes: kernel by kernel.

    python benchmarks/step_kernels.py 32x4x256x64:causal:dropout=0.2
    python benchmarks/step_kernels.py 32x4x256x64:causal:dropout=0.2 --methods plain twicing degree1
    python benchmarks/step_kernels.py 2x2x16x8:causal --layers 2 --vocabulary 64   # on a CPU

A new GPT-2 of the shape's heads, with its dropout everywhere in the model, trains on random tokens
as the recipe does with ``precision=bf16 compile=blocks graphs=true``: a step is compiled block by
block and replayed from a CUDA graph. Printed are each method's kernels that take most time
together, then, side by side, kinds of kernels and the kernels that differ most. On a CPU steps are
eager, and the host's calls are listed.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from gfsa_benchmarks import profiling
from gfsa_benchmarks.case import Shape
from gfsa_benchmarks.profiling import Profile, Spent
from gfsa_experiments.engine.compiling import compile_blocks
from gfsa_experiments.engine.next_token_loss import IGNORED, NextTokenLoss
from gfsa_experiments.engine.optimiser import build_optimiser
from gfsa_experiments.engine.train_step import EagerStep, GraphedStep
from gfsa_experiments.runs.methods import METHODS, MethodConfig
from gfsa_experiments.tasks.causal_lm.recipe import CausalLMConfig, causal_by_kernel, new_model

WIDTH = 150
LISTED = 24
# run eagerly, captured, replayed, and once more
WARM_UP = 4
TIMED = 50


def settings(shape: Shape, layers: int, vocabulary: int, graphs: bool) -> CausalLMConfig:
    return CausalLMConfig(
        model="scratch",
        tokenizer="bpe",
        vocab_size=vocabulary,
        block=shape.tokens,
        dropout=shape.dropout,
        depth=layers,
        width=shape.heads * shape.dim,
        heads=shape.heads,
        batch_size=shape.batch,
        weight_decay=0.1,
        beta2=0.95,
        graphs=graphs,
    )


def training_step(
    model: Any, method: str, config: CausalLMConfig, accelerator: Accelerator, tokens: Tensor
) -> Callable[[], object]:
    """A step of ``model`` under a method, as the recipe trains it."""
    known = set(model.parameters())
    METHODS[method].apply(model, MethodConfig())
    added = [parameter for parameter in model.parameters() if parameter not in known]
    model.to(accelerator.device).train()
    cuda = accelerator.device.type == "cuda"
    mean = NextTokenLoss(compiled=cuda)

    def loss(called: nn.Module, batch: Any) -> Tensor:
        ids = batch["input_ids"].long()
        with causal_by_kernel(model):
            logits = called(input_ids=ids, use_cache=False).logits
        return mean(logits, F.pad(ids[:, 1:], (0, 1), value=IGNORED))

    optimiser = build_optimiser(model, added, config, filter_lr=None)
    prepared, optimiser = accelerator.prepare(model, optimiser)
    if cuda:
        compile_blocks(model)
    make_step = GraphedStep if config.graphs else EagerStep
    step = make_step(accelerator, prepared, optimiser, loss, config.clip)
    return lambda: step([{"input_ids": tokens}])


def milliseconds(step: Callable[[], object], steps: int) -> float:
    """The mean time of a step, steps one after the other."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def on_gpu(found: Profile) -> str:
    """Kernels by the time that they take together in a step."""
    return _lines(found.kernels)


def on_host(step: Callable[[], object]) -> str:
    """The host's calls of a step by their own time."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    spent = {
        event.key: Spent(event.self_cpu_time_total / 1e3, event.count)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CPU
    }
    return _lines(spent)


def _lines(spent: Mapping[str, Spent]) -> str:
    slowest = sorted(spent.items(), key=lambda item: -item[1].ms)
    lines = [
        f"    {each.ms * 1e3:8.1f} µs, {each.launches:6.1f} × {each.ms / each.launches * 1e3:7.1f}"
        f"  {name[:90]}"
        for name, each in slowest[:LISTED]
    ]
    rest = [each for _, each in slowest[LISTED:]]
    if rest:
        total, count = sum(each.ms for each in rest), sum(each.launches for each in rest)
        lines.append(f"    {total * 1e3:8.1f} µs, {count:6.1f} of {len(rest)} others")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", type=Shape.parse, help="such as 32x4x256x64:causal:dropout=0.2")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["plain", "gfsa"])
    given = parser.parse_args(arguments)
    shape = given.shape
    if shape.padded or shape.key_heads is not None or not shape.causal:
        parser.error(f"a GPT-2 takes causal shapes without padding and groups, got {shape}")
    cuda = torch.cuda.is_available()
    console = Console(width=WIDTH)
    torch.manual_seed(0)
    config = settings(shape, given.layers, given.vocabulary, graphs=cuda)
    plain = new_model(config, given.vocabulary)
    accelerator = Accelerator(mixed_precision="bf16" if cuda else "no", cpu=not cuda)
    tokens = torch.randint(given.vocabulary, (shape.batch, shape.tokens))
    tokens = tokens.to(accelerator.device)
    profiles = {}
    for method in given.methods:
        step = training_step(copy.deepcopy(plain), method, config, accelerator, tokens)
        milliseconds(step, WARM_UP)
        print(f"{method}: {milliseconds(step, TIMED if cuda else 1):.3f} ms a step", flush=True)
        if cuda:
            profiles[method] = profiling.profile_step(step, accelerator.device)
        print(on_gpu(profiles[method]) if cuda else on_host(step), flush=True)
    if profiles:
        console.print(profiling.kinds_table(profiles))
        console.print(profiling.kernels_table(profiles))


if __name__ == "__main__":
    main()
