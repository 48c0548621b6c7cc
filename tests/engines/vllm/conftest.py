"""Settings of vLLM for these tests; vLLM reads them from the environment when it is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_models import Checkpoint, plugged_checkpoint

# the engine in this process: a start takes seconds instead of the import of vLLM in another one
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# processes that vLLM starts find the helpers of these tests
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def vllm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled graphs of this session alone: a graph of an earlier version would hide an error."""
    folder = tmp_path_factory.mktemp("vllm-cache")
    os.environ["VLLM_CACHE_ROOT"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, vllm_cache: Path):
    """Architecture → its plugged checkpoint with what transformers generates, made when asked."""
    made: dict[str, Checkpoint] = {}

    def checkpoint(architecture: str) -> Checkpoint:
        if architecture not in made:
            folder = tmp_path_factory.mktemp("models") / architecture
            made[architecture] = plugged_checkpoint(architecture, folder)
        return made[architecture]

    return checkpoint
