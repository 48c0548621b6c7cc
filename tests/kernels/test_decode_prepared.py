"""A decoded token by a prepared launch: what the kernel is given, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gfsa.kernels import decode as kernels
from gfsa.kernels.decode import PreparedToken
from gfsa.kernels.launcher import Direct, Launch
from gfsa.operators import Coefficients

STREAM = 7
# where the C launcher's arguments begin: 13 of the launch, then the kernel's own
POINTERS = 13
RESULT = POINTERS + 9
NUMBERS = POINTERS + 12


def direct_that_keeps(launched: list[tuple[Any, ...]], constants: tuple[Any, ...]) -> Direct:
    """A launch whose C launcher keeps its arguments."""
    direct: Any = Direct.__new__(Direct)
    direct.c_launcher = lambda *arguments: launched.append(arguments)
    direct.stream = lambda index: STREAM
    direct.arguments, direct.tiles = [None] * 13, []
    direct.constants = direct.fixed = constants
    found: Direct = direct
    return found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The C launcher's arguments, launch by launch; all code counts as compiled."""
    arguments: list[tuple[Any, ...]] = []
    made = kernels._launch.__wrapped__

    def compiled(*given: Any) -> Launch:
        launch = made(*given)
        launch.direct[()] = direct_that_keeps(arguments, launch.constants)
        return launch

    monkeypatch.setattr(kernels, "_launch", compiled)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return arguments


def token(masked: bool, degree: int = 2) -> tuple[Any, ...]:
    q, u = torch.randn(2, 2, 4, 20, 8).unbind(0)
    k, v = torch.randn(2, 2, 2, 20, 8).unbind(0)
    powers = degree + 1
    coeffs = Coefficients(torch.randn(4, 2), torch.randn(4, powers), torch.randn(2, powers))
    mask = torch.ones(2, 1, 1, 20, dtype=torch.bool) if masked else None
    return q[:, :, -1:], k, v, u if degree == 2 else None, coeffs, mask


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
def test_the_kernel_gets_what_decode_gives_it(
    masked: bool,
    static: bool,
    splits: int,
    degree: int,
    launched: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_splits", lambda *_: splits)
    given = token(masked, degree)
    count: tuple[Any, ...] = (None, 0.3, None)
    if static:
        counters = kernels.new_counters(8, torch.device("cpu"))
        count = (torch.tensor(9), 0.3, counters)
    # u and with degree 2 w, the largest score and as many sums of weights
    part = {1: 16 + 2, 2: 2 * 16 + 3}[degree]
    room = kernels.kept_room(8 * splits * part, 8, given[0].device, STREAM)

    def same_room(count: int, heads: int, counters: Tensor | None, *others: Any) -> Any:
        return room[0], room[1] if counters is None else counters

    monkeypatch.setattr(kernels, "_room", same_room)
    results = [kernels.decode(*given, *count), PreparedToken(given[0])(*given, *count)]
    wanted, found = ([*arguments] for arguments in launched)
    for arguments, y in zip((wanted, found), results, strict=True):
        # each result has an address of its own
        assert arguments[RESULT] == y.data_ptr()
        del arguments[RESULT]
    assert found == wanted
    assert found[3] == STREAM
    assert found[-1] == degree
    assert results[0].shape == results[1].shape == (2, 4, 1, 8)


def test_the_launch_of_each_layout_of_powers(launched: list[tuple[Any, ...]]) -> None:
    """The cache of powers has free rows now and then; nothing else of a signature changes."""
    q, k, v, u, *others = token(False)
    prepared = PreparedToken(q)
    larger = torch.randn(2, 4, 36, 8)
    for rows in (u, larger, u):
        prepared(q, k, v, rows, *others, None, 0.3)
    steps = [arguments[NUMBERS + 12 : NUMBERS + 15] for arguments in launched]
    assert steps == [tuple(s // kernels._STEP for s in x.stride()[:3]) for x in (u, larger, u)]


@pytest.mark.parametrize("degree", [1, 2])
def test_tensors_may_begin_anywhere(degree: int, launched: list[tuple[Any, ...]]) -> None:
    """The kernel loads 16 bytes at a time: what begins elsewhere is copied."""
    q, k, v, u, *others = token(False, degree)
    off = torch.cat([k.new_zeros(1), k.flatten()])[1:].view(k.shape)
    assert off.data_ptr() % 16
    PreparedToken(q)(q, off, v, u, *others, None, 0.3)
    (arguments,) = launched
    assert arguments[POINTERS + 1] != off.data_ptr()
    assert not any(address % 16 for address in arguments[POINTERS : POINTERS + 4])


def test_a_captured_graph_has_room_of_its_own(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(kernels, "_splits", lambda *_: 4)
    asked: list[Any] = []
    room = kernels._room
    monkeypatch.setattr(kernels, "_room", lambda *given: asked.append(given) or room(*given))
    given = token(False)
    PreparedToken(given[0])(*given, None, 0.3)
    assert len(asked) == len(launched) == 1


def test_code_that_is_not_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles it in a call of :func:`decode`."""
    asked: list[Any] = []
    monkeypatch.setattr(kernels, "decode", lambda *given: asked.append(given))
    given = token(True)
    prepared = PreparedToken(given[0])
    prepared(*given, None, 0.3)
    assert len(asked) == 1
    assert not prepared.ready
