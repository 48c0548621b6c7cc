"""Run by torchrun: pretrain a tiny decoder on two processes, interrupted once and resumed.

FSDP2 shards it, or each process has a copy (DDP):

torchrun --nproc-per-node=2 tests/scale/workers/pretraining.py DATA OUT sharded|replicated
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

sys.path.insert(0, str(Path(__file__).parents[2]))

from gfsa_experiments.engine.checkpoints import LoopCheckpoints
from gfsa_experiments.runs import run as runs
from support.tiny_pretraining import a_run

# validation has more batches than each of two processes has, so that one has a batch less
SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "checkpoint_every": 2,
    "eval_rows": 6,
    "eval_batch_size": 2,
    "save_model": True,
}


def sharding(**given: Any) -> accelerate.Accelerator:
    """An Accelerator with FSDP2, which accelerate offers on GPUs only."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    )
    accelerator = accelerate.Accelerator(**given, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    return accelerator


def main() -> None:
    data, out = map(Path, sys.argv[1:3])
    # plugging looks at every object: this takes those of the imports, nearly all, out of its way
    gc.freeze()
    run = a_run(data, out, "gfsa", **SETTINGS)
    if sys.argv[3] == "sharded":
        runs.Accelerator = sharding  # type: ignore[misc]
        with pytest.raises(ValueError, match=r"ema=0\.9 needs all weights in one process"):
            runs.carry_out(a_run(data, out / "refused", "gfsa", ema=0.9))

    saved = []
    save = LoopCheckpoints.save

    def save_once(checkpoints: LoopCheckpoints) -> None:
        save(checkpoints)
        saved.append(checkpoints.state.step)
        if len(saved) == 1:
            raise KeyboardInterrupt

    LoopCheckpoints.save = save_once  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        runs.carry_out(run)
    AcceleratorState._reset_state()
    runs.carry_out(dataclasses.replace(run, resume=True))
    assert saved == [2, 4], saved
    kinds = {"sharded": DistributedType.FSDP, "replicated": DistributedType.MULTI_CPU}
    assert PartialState().distributed_type == kinds[sys.argv[3]]


if __name__ == "__main__":
    main()
