"""Launches by compiled code, and where they go through Triton's own launcher; without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gfsa.operators.fused import launcher, tile_access
from gfsa.operators.fused.launcher import Kernel, Launch

BLOCK = (1, 1, 16, 16)


class FakeKernel:
    """Compiles and launches as a Triton kernel does, and keeps what it was given."""

    def __init__(self, metadata: Any) -> None:
        self.by_triton: list[tuple[Any, ...]] = []
        self.by_code: list[tuple[Any, ...]] = []

        def launch(*arguments: Any) -> None:
            """As Triton's wrapper around its launcher in C, whose variables are read."""
            raise AssertionError((launcher, tensordesc_meta, arguments))

        launcher, tensordesc_meta = None, metadata
        self.run = SimpleNamespace(
            global_scratch_size=0,
            profile_scratch_size=0,
            launch=launch,
            launch_cooperative_grid=False,
            launch_pdl=False,
        )
        self.function = self.packed_metadata = None

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            # options are those of the compiler
            (self.by_triton if options else self.by_code).append(arguments)
            return self

        return launch


def test_addresses_are_compiled_for_their_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """So code that is compiled for some is not launched with others."""
    monkeypatch.setattr(tile_access, "has_copy_engine", lambda x: False)
    fake = FakeKernel(None)
    launch = Launch(Kernel(fake, tile_access.describe), (1, 1, 1), (), [BLOCK], (), (), num_warps=4)
    for x in (torch.zeros(1, 2, 16, 16), torch.zeros(1, 16, 2, 16).transpose(1, 2)):
        launch([x], x)
        launch([x], x)
    assert not fake.by_code
    strides = [described[1:4] for described, _ in fake.by_triton]
    # in units of 16 bytes, four numbers of 32 bits
    assert strides == [(128, 64, 4), (128, 64, 4), (128, 4, 8), (128, 4, 8)]


def test_descriptors_on_a_gpu_without_a_copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes them apart itself, in its own launcher, and has no metadata of the engine."""
    utils = SimpleNamespace(fill_tma_descriptor=None)
    active = SimpleNamespace(utils=utils, get_current_stream=None)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=active))
    fake = FakeKernel([None])
    launch = Launch(Kernel(fake), (1, 1, 1), (), [BLOCK], (), (), num_warps=4)
    x = torch.zeros(1, 2, 16, 16)
    for _ in range(3):
        launch([x], x)
    assert len(fake.by_triton) == 1
    assert [described.base is x for described, _ in fake.by_code] == [True, True]
