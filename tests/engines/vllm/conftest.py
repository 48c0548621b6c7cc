"""Settings of vLLM for these tests; vLLM reads them from the environment when it is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import Checkpoint, checkpoint_of

# the engine in the process that asks for it, which shows its errors
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def vllm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled graphs of this session alone: a graph of an earlier version would hide an error."""
    folder = tmp_path_factory.mktemp("vllm-cache")
    os.environ["VLLM_CACHE_ROOT"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, vllm_cache: Path
) -> Callable[[str], Checkpoint]:
    """Recipe → its checkpoint with what transformers generates, made when it is asked for."""
    made: dict[str, Checkpoint] = {}

    def checkpoint(recipe: str) -> Checkpoint:
        if recipe not in made:
            made[recipe] = checkpoint_of(recipe, tmp_path_factory.mktemp("model"))
        return made[recipe]

    return checkpoint
