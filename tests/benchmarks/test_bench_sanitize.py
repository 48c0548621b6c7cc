"""``benchmarks/handover.py``: the control for racecheck compiles, and hands over as it says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from gfsa.kernels import routes  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "handover.py"


@pytest.mark.skipif(
    routes.TRITON != routes.MEASURED_TRITON, reason="Gluon changes with Triton's version"
)
def test_every_arrival_follows_a_barrier_of_its_warps() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    spec = importlib.util.spec_from_file_location("handover", SCRIPT)
    handover = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(handover)
    source = GluonASTSource(handover.hand_over, {"out": "*i32", "count": "i32"}, {}, {})
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4})
    # in the order of the text: accesses to shared memory, barriers of warps and those in memory
    steps = re.findall(
        r"bar\.warp\.sync|bar\.sync|(?:ld|st)\.shared\.b32|mbarrier\.(?:try_wait|arrive)",
        compiled.asm["ptx"],
    )
    text = " ".join(steps)
    assert "mbarrier.try_wait ld.shared.b32 bar.sync mbarrier.arrive" in text
    assert "mbarrier.try_wait st.shared.b32 bar.warp.sync mbarrier.arrive" in text
    assert steps.count("mbarrier.arrive") == 2
