"""Settings that have to be in place before torch is imported, and hypothesis' profile."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from fnmatch import fnmatch
from pathlib import Path

# some CPUs advertise bfloat16 instructions that oneDNN's newest kernels then fault on
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import pytest
import torch
from hypothesis import HealthCheck, settings

# seeds are fixed so that a red run can be run again; deadlines mean nothing on shared machines
settings.register_profile(
    "gfsa",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("gfsa")


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Tests write into folders of their own: what they leave in the checkout would be committed."""
    before = set(os.listdir(ROOT))
    yield
    # what git ignores is not: of pytest and coverage, or of `make docs` beside the tests
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    ignored = [line.strip("/") for line in lines]
    new = {name for name in set(os.listdir(ROOT)) - before if not name.startswith(".")}
    left = sorted(name for name in new if not any(fnmatch(name, each) for each in ignored))
    assert not left, f"a test has left {left} in {ROOT}; write into tmp_path"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _leaves_gpu_to_others() -> Iterator[None]:
    """Tests in other processes share the GPU, and find no room where this one keeps its memory."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture
def accelerate_alone() -> Iterator[None]:
    """Trainer and Accelerator keep their settings in process-wide singletons: none is left over."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()

    forget()
    yield
    forget()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # an earlier test may have imported SpeechBrain
    _forget_lazy_modules()


def pytest_configure(config: pytest.Config) -> None:
    # one thread a worker: two workers on two cores otherwise fight over them
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from what the imports of all tests leave behind.

    Those are 800,000 objects that stay until the end, and a look at each of them takes half a
    second: a third of the processor time of tests that train.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _imports_of_tests_too() -> Iterator[None]:
    """Frameworks import much of themselves when they are first used, in a test."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long runs are asked for by name: ``pytest -m slow``."""
    _forget_lazy_modules()
    if "slow" in (config.getoption("-m") or ""):
        return
    kept = [item for item in items if "slow" not in item.keywords]
    config.hook.pytest_deselected(items=[item for item in items if "slow" in item.keywords])
    items[:] = kept


def _forget_lazy_modules() -> None:
    """SpeechBrain leaves modules behind that fail when looked at, and hypothesis looks at all."""
    global _looked_through
    # a look through thousands of modules before each of thousands of tests takes its time
    if len(sys.modules) == _looked_through:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("speechbrain.") and "__file__" not in vars(type(module)) | vars(module):
            del sys.modules[name]
    _looked_through = len(sys.modules)


_looked_through = 0
"""How many modules there were when all of them had been looked at."""
