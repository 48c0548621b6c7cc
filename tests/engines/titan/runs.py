"""Runs of torchtitan in processes of their own, on the CPU."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.shared import TESTS, torchrun

HERE = Path(__file__).parent


def overrides(rate: float = 0.05, K: int = 3) -> tuple[str, ...]:
    """The arguments that put filters into a model, trained with a rate of their own."""
    return (
        "--override.imports",
        f'gfsa.titan.filters={{"K": {K}}}',
        f'gfsa.titan.optimizer={{"lr": {rate}}}',
        "gfsa.titan.checkpoint",
    )


@dataclass(frozen=True)
class Run:
    """What a run left."""

    folder: Path
    output: str
    losses: list[float]
    norms: list[float]
    groups: list[dict[str, Any]]
    """The optimiser's parameter groups: learning rate at the start, weight decay and names."""

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoint" / f"step-{step}"


def train(
    folder: Path,
    config: str,
    assets: Path,
    *arguments: str,
    filters: tuple[str, ...] = overrides(),
    checkpoint: tuple[str, ...] = (),
    load: Path | None = None,
    processes: int = 1,
    steps: int = 3,
) -> Run:
    """Train a configuration of ``tiny.py`` with torchrun; ``folder`` gets its checkpoints.

    Args:
        arguments: they come last: some are subcommands.
        checkpoint: switches among torchtitan's settings of checkpoints.
        load: the checkpoint that it begins with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output = torchrun(
        processes,
        *(str(HERE / "cpu.py"), "--module", "tiny", "--config", config),
        *("--dump_folder", str(folder), "--training.steps", str(steps)),
        *filters,
        *("--hf_assets_path", str(assets), "--checkpoint.enable"),
        *(f"--checkpoint.{switch}" for switch in checkpoint),
        *(("--checkpoint.initial_load_path", str(load)) if load else ()),
        *arguments,
        PYTHONPATH=os.pathsep.join([str(HERE), str(TESTS), os.environ.get("PYTHONPATH", "")]),
        LOSSES=str(folder / "losses"),
    )
    ranks = [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(processes)]
    # of the stages of a pipeline the last one has the loss
    last = ranks[-1]
    return Run(
        folder,
        output,
        [step["loss"] for step in last["steps"]],
        [step["norm"] for step in last["steps"]],
        [group for rank in ranks for group in rank["groups"]],
    )


def seed(folder: Path, assets: Path, config: str = "llama") -> Path:
    """A DCP checkpoint of a few steps, after which no filter is the identity."""
    return train(folder, config, assets, steps=4).checkpoint(4)


def export(folder: Path, assets: Path, checkpoint: Path, processes: int = 1) -> Path:
    """The weights of a DCP checkpoint as a transformers folder: a step at rate 0."""
    run = train(
        folder,
        "llama_at_rest",
        assets,
        *("--training.local_batch_size", str(4 // processes)),
        filters=overrides(rate=0.0),
        checkpoint=("last_save_in_hf",),
        load=checkpoint,
        steps=1,
        processes=processes,
    )
    return run.checkpoint(1)
