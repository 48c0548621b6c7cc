"""Launches by compiled code: how they are laid out, and when Triton launches; without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gfsa.kernels import hopper, launching
from gfsa.kernels.launching import Kernel, Launch, Options, problem_of
from gfsa.kernels.op import FusedOperator
from gfsa.operators import AttentionCall

BLOCK = (1, 1, 16, 16)


@pytest.fixture(autouse=True)
def _without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = SimpleNamespace(fill_tma_descriptor=None)
    active = SimpleNamespace(utils=utils, get_current_stream=lambda index: 0)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))


class FakeKernel:
    """Compiles and launches as a Triton kernel does, and keeps what it was given."""

    def __init__(self, metadata: Any) -> None:
        self.by_triton: list[tuple[Any, ...]] = []
        self.by_code: list[tuple[Any, ...]] = []

        def launch(*arguments: Any) -> None:
            """As Triton's wrapper around its launcher in C, whose variables are read."""
            raise AssertionError((launching, tensordesc_meta, arguments))

        launching, tensordesc_meta = None, metadata
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
    monkeypatch.setattr(launching, "has_copy_engine", lambda x: False)
    fake = FakeKernel(None)
    launch = Launch(Kernel(fake), (1, 1, 1), (), [BLOCK], (), (), num_warps=4)
    for x in (torch.zeros(1, 2, 16, 16), torch.zeros(1, 16, 2, 16).transpose(1, 2)):
        launch([x], x)
        launch([x], x)
    assert not fake.by_code
    strides = [described[1:4] for described, _ in fake.by_triton]
    # in units of 16 bytes, four numbers of 32 bits
    assert strides == [(128, 64, 4), (128, 64, 4), (128, 4, 8), (128, 4, 8)]


def test_descriptors_on_a_gpu_without_a_copy_engine() -> None:
    """Triton takes them apart itself, in its own launching, and has no metadata of the engine."""
    fake = FakeKernel([None])
    launch = Launch(Kernel(fake), (1, 1, 1), (), [BLOCK], (), (), num_warps=4)
    x = torch.zeros(1, 2, 16, 16)
    for _ in range(3):
        launch([x], x)
    assert len(fake.by_triton) == 1
    assert [described.base is x for described, _ in fake.by_code] == [True, True]


class Pointer:
    """A tensor that is asked for its address in the middle of a launch."""

    device = SimpleNamespace(index=0)

    def __init__(self, address: int, asked: Any = lambda: None) -> None:
        self.address, self.asked = address, asked

    def data_ptr(self) -> int:
        self.asked()
        return self.address


@pytest.mark.parametrize("scratch", [0, 1], ids=["by the C launcher", "by Triton's own"])
def test_numbers_of_a_call_are_its_own(scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may launch the same kernel with its numbers before this one has."""
    launched: list[tuple[Any, ...]] = []

    def by_c(*arguments: Any) -> None:
        launched.append(arguments[13:])

    monkeypatch.setattr(launching, "TRITON", launching.DIRECT_TRITON[0])
    fake = FakeKernel(None)
    fake.run.global_scratch_size, fake.run.launch = scratch, by_c
    launch = Launch(Kernel(fake), (1, 1, 1), (), (), (), ("constant",), num_warps=4)
    launch((), Pointer(1), numbers=(1,))
    other = Pointer(3)

    def meanwhile() -> None:
        launch((), other, numbers=(3,))

    mine = Pointer(2, meanwhile)
    launch((), mine, numbers=(2,))
    if scratch:
        assert fake.by_triton == [(fake.by_triton[0][0], 1, "constant")]
        assert fake.by_code == [(mine, 2, "constant")]
    else:
        assert launched == [(3, 3, "constant"), (2, 2, "constant")]


@pytest.mark.parametrize("version", [launching.DIRECT_TRITON[0], "3.6.1"])
def test_a_launcher_with_other_arguments_is_not_relied_on(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises before it launches; versions that are not known are not even tried."""
    tried: list[tuple[Any, ...]] = []

    def by_c(*arguments: Any) -> None:
        tried.append(arguments)
        raise TypeError("function takes exactly 12 arguments")

    monkeypatch.setattr(launching, "TRITON", version)
    fake = FakeKernel(None)
    fake.run.launch = by_c
    launch = Launch(Kernel(fake), (1, 1, 1), (), (), (), ("constant",), num_warps=4)
    for number in (1, 2, 3):
        launch((), Pointer(number), numbers=(number,))
    assert [given[1:] for given in fake.by_code] == [(2, "constant"), (3, "constant")]
    assert bool(tried) is (version in launching.DIRECT_TRITON)


def test_options_of_the_compiler_are_compiled_for() -> None:
    """Two cuts of the same tiles that differ in warps alone are two kernels."""
    fake = FakeKernel(None)
    kernel, x = Kernel(fake), torch.zeros(1)
    for warps in (4, 8):
        Launch(kernel, (1, 1, 1), (), (), (), (64, 64), num_warps=warps)((), x)
    assert len(fake.by_triton) == 2


@pytest.mark.parametrize(
    ("shape", "options", "masked", "expected"),
    [
        ((4, 16, 4096, 128), Options(0.1, True), False, True),
        ((8, 32, 2048, 128), Options(0.1, True), False, True),
        ((8, 32, 2044, 128), Options(0.1, True), False, False),
        ((4, 16, 4096, 128), Options(0.1), False, True),
        ((4, 16, 4100, 128), Options(0.1, True), False, True),
        ((4, 16, 4100, 128), Options(0.1), False, False),
        ((4, 16, 4096, 128), Options(0.1), True, False),
        ((4, 16, 4096, 104), Options(0.1, True), False, False),
        ((4, 16, 4096, 128), Options(0.1, True), True, False),
        ((4, 16, 4096, 96), Options(0.1, True), False, False),
        ((4, 16, 4096, 64), Options(0.1, True), False, False),
    ],
    ids=str,
)
def test_dq_is_added_up_in_any_order_unless_bits_have_to_be_equal(
    shape: tuple[int, ...], options: Options, masked: bool, expected: bool
) -> None:
    """Long sequences of wide heads without a mask but causality; without it, of whole tiles."""
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    mask = torch.ones(shape[0], 1, 1, shape[2], dtype=torch.bool) if masked else None
    problem = problem_of(q, q, mask, options)
    assert hopper.adds_up_queries(problem, False) is expected
    assert not hopper.adds_up_queries(problem, True)


def test_each_stride_of_64_bits_has_code_of_its_own() -> None:
    """Code whose first stride has 64 bits, the second 32, would cut a second one of 64."""
    q = torch.empty(2, 2, 16, 16, dtype=torch.bfloat16)
    memory = torch.empty(2**33, dtype=torch.bool, device="meta")
    far = 2**31
    variants = {
        problem_of(q, q, memory.as_strided((2, 2, 16, 16), strides), Options(0.1)).variant
        for strides in [(9, 9, 9, 1), (far, 9, 9, 1), (9, far, 9, 1), (far, far, 9, 1)]
    }
    assert len(variants) == 4


def test_integers_are_no_other_kernels() -> None:
    """Triton compiles the int 1 in, and the code would serve every other scale after it."""
    q = torch.empty(1, 1, 16, 16, dtype=torch.bfloat16)
    options = FusedOperator(AttentionCall(q, q, dropout_p=0, scale=1)).options
    assert options == Options(1.0, False, 0.0)
    assert type(options.scale) is float
    assert type(options.dropout_p) is float
