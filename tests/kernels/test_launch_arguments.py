"""Each Gluon launch hands over what its kernel takes, in its order; nothing is launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gfsa.kernels import hopper, op, routes, sweep
from gfsa.kernels.launching import Inputs, Launch, Options, Saved, problem_of
from gfsa.operators import Visibility
from support.nothing_launched import fresh_launches

if routes.TRITON != routes.MEASURED_TRITON:
    pytest.skip("Gluon changes with Triton's version", allow_module_level=True)

SCALE, HEADS, TOKENS = 0.1, 4, 2048
TOKEN_NAMES = {"out", "u_out", "du_out", "dk_out", "dv_out", "dq_out"}
INTEGERS = {"flags", "spans", "plan"}
COUNTERS = {"flags", "counter"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Launch, dict[str, Any]]]]:
    """Launches with their arguments by name."""
    taken: list[tuple[Launch, dict[str, Any]]] = []

    def record(
        self: Launch, tensors: Any, *pointers: Tensor, numbers: tuple[Any, ...] | None = None
    ) -> None:
        assert len(tensors) == len(self.blocks)
        given = (*tensors, *pointers, *(self.numbers if numbers is None else numbers))
        names = self.kernel.function.arg_names
        taken.append((self, dict(zip(names, (*given, *self.constants), strict=True))))

    monkeypatch.setattr(Launch, "__call__", record)
    monkeypatch.setattr(sweep, "multiprocessors", lambda device: 132)
    with fresh_launches():
        yield taken


def seen_by(kind: str) -> Tensor | None:
    if kind == "keys":
        return torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    if kind == "causal" or kind == "none":
        return None
    documents = torch.tensor([[0] * 300 + [1] * (TOKENS - 300), [0] * TOKENS])[:, None]
    visible = Visibility(causal=True, documents=documents, in_order=True)
    return visible.spans(TOKENS, torch.device("cpu"))


def tokens(heads: int, dim: int) -> Tensor:
    return torch.zeros(2, heads, TOKENS, dim, dtype=torch.bfloat16)


def check(launch: Launch, arguments: dict[str, Any], mask: Tensor | None) -> None:
    """Tensors of the type, numbers of the size and tiles of the shape that a name stands for."""
    name = launch.kernel.function.fn.__name__
    tiles = list(arguments)[: len(launch.blocks)]
    for (argument, x), block in zip(arguments.items(), launch.blocks, strict=False):
        number = argument in ("lse_cols", "delta_cols")
        assert x.dtype == (torch.float32 if number else torch.bfloat16), (name, argument)
        assert block[:2] == (1, 1), (name, argument)
        # the copy engine's limit for a side, in numbers
        assert max(block) <= 256, (name, argument)
    for argument, x in arguments.items():
        if not isinstance(x, Tensor) or argument in tiles:
            continue
        used = {"shares": "EXCLUSIVE", "flags": "DRAWS"}.get(argument)
        if used is not None and not arguments.get(used, True):
            # any address stands in for what is not read
            continue
        if argument == "mask" and mask is not None:
            expected = torch.int32 if mask.dtype == torch.int32 else torch.uint8
        elif argument in INTEGERS and mask is not None:
            expected = torch.int32
        elif argument in TOKEN_NAMES:
            expected = torch.bfloat16
        elif argument in ("mask", "plan"):
            continue
        else:
            expected = torch.int32 if argument in COUNTERS else torch.float32
        assert x.dtype == expected, (name, argument)
    known = {"heads": HEADS, "n": TOKENS, "scale": SCALE, "total": 2 * HEADS}
    for argument, expected in known.items():
        assert arguments.get(argument, expected) == expected, (name, argument)


@pytest.mark.parametrize("forward", [sweep.forward, sweep.forward_once])
@pytest.mark.parametrize(
    # 12 heads of 9 and of 128 blocks: what the tests of deadlocks on a GPU count on
    ("length", "processors", "programs"),
    [(1100, 7, 7), (1100, 1000, 108), (16_300, 1000, 1000), (16_300, 10_000, 1536)],
)
def test_a_program_for_each_multiprocessor_or_block(
    launched: list[tuple[Launch, dict[str, Any]]],
    forward: Any,
    length: int,
    processors: int,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep, "multiprocessors", lambda device: processors)
    q, k, v = (torch.zeros(2, heads, length, 64, dtype=torch.bfloat16) for heads in (6, 3, 3))
    options = Options(SCALE, True)
    forward(Inputs(q, k, v, torch.zeros(6, 3), None, None, options))
    ((launch, _),) = launched
    assert launch.grid == (programs, 1, 1)


def test_heads_whose_keys_fit_into_the_cache_go_together() -> None:
    q = torch.empty(64, 12, 1024, 64, dtype=torch.bfloat16, device="meta")
    causal, every = (problem_of(q, q[:, :3], None, Options(SCALE, x)) for x in (True, False))
    assert sweep.heads_at_a_time(causal, 1) == 96 * 4
    # heads that share keys, which all of their blocks read
    assert sweep.heads_at_a_time(every, 1) == 4


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["causal", "spans"])
def test_the_causal_sweep(launched: list[Any], kind: str, dim: int) -> None:
    mask = seen_by(kind)
    q, k, v = tokens(HEADS, dim), tokens(2, dim), tokens(2, dim)
    given = Inputs(q, k, v, torch.zeros(HEADS, 3), mask, None, Options(SCALE, True))
    out, u, lse = sweep.forward(given)
    names = [launch.kernel.function.fn.__name__ for launch, _ in launched]
    assert names == (["plan_blocks"] if mask is not None else []) + ["filter_sweep"]
    for launch, arguments in launched:
        check(launch, arguments, mask)
    _, last = launched[-1]
    assert (last["out"] is out, last["u_out"] is u, last["u_io"] is u) == (True,) * 3
    assert last["lse_out"] is lse
    assert (last["out_b"], last["out_h"], last["out_i"]) == out.stride()[:3]
    assert last["MASK"] == (0 if mask is None else 3)
    if mask is not None:
        # both kernels find the same numbers in the same memory
        _, first = launched[0]
        assert first["flags"] is last["flags"]
        assert (first["mask_b"], first["blocks"]) == (last["mask_b"], last["blocks"])
        assert first["TILE"] == last["TILE"]
        assert first["row_flags"] * 2 == last["total"] * last["blocks"] * 2


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("kind", ["none", "causal", "keys", "spans"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_gradient_for_hopper(
    launched: list[Any], kind: str, dim: int, deterministic: bool
) -> None:
    mask = seen_by(kind)
    q, g, u, out = (tokens(HEADS, dim) for _ in range(4))
    k, v = tokens(2, dim), tokens(2, dim)
    lse, coeffs = torch.zeros(2, HEADS, TOKENS), torch.zeros(HEADS, 3)
    options = Options(SCALE, kind in ("causal", "spans"))
    torch.use_deterministic_algorithms(deterministic)
    try:
        dq, dk, dv, _ = hopper.backward(g, Saved(q, k, v, u, out, lse, coeffs, mask), options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    by_name = {launch.kernel.function.fn.__name__: given for launch, given in launched}
    added_up = dim == 128 and kind in ("none", "causal") and not deterministic
    last = "finish_queries" if added_up else "grad_queries"
    assert [*by_name][-3:] == ["grad_first_pass", "grad_keys", last]
    for launch, arguments in launched:
        check(launch, arguments, mask)
    first, keys, queries = (by_name[x] for x in ("grad_first_pass", "grad_keys", last))
    assert keys["WITH_QUERIES"] == added_up
    # what one kernel writes, the next ones read
    assert first["du_rows"] is keys["du_cols"]
    assert first["delta_out"].data_ptr() == keys["delta_cols"].data_ptr()
    if added_up:
        assert queries["sums"] is keys["sums"]
        assert queries["sums"].numel() == 2 * HEADS * TOKENS * 128
    else:
        assert queries["delta_in"] is first["delta_out"]
        assert queries["du_rows"] is first["du_rows"]


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("kind", ["none", "causal", "spans"])
@pytest.mark.parametrize("exclusive", [False, True])
def test_degree_one(launched: list[Any], kind: str, dim: int, exclusive: bool) -> None:
    mask, options = seen_by(kind), Options(SCALE, kind != "none", exclusive=exclusive)
    q, g, k, v = (tokens(heads, dim) for heads in (HEADS, HEADS, 2, 2))
    coeffs, share = torch.zeros(HEADS, 2), torch.zeros(HEADS) if exclusive else None
    given = q, k, v, coeffs, mask, None, options, True, share
    out, u, lse = op.run_forward("one_sweep", *given)
    assert bool(u.numel()) == exclusive
    saved = Saved(q, k, v, u, u if exclusive else out, lse, coeffs, mask, None, share)
    dq, dk, dv, _ = op.run_backward("hopper", g, saved, options)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    by_name = {launch.kernel.function.fn.__name__: given for launch, given in launched}
    assert [*by_name][:3] == ["filter_sweep", "grad_queries_one", "grad_keys_one"]
    for launch, arguments in launched:
        check(launch, arguments, mask)
    attend, queries, keys = [*by_name.values()][:3]
    assert (attend["out_io"] is out, attend["lse_out"] is lse) == (True, True)
    assert queries["delta_out"] is keys["delta_cols"]
    # dU, which one kernel writes, is what the other reads in place of g
    assert queries["du_rows"] is keys["g_cols"]
    assert (keys["g_cols"] is g, keys["u_rows"] is u) == (not exclusive, exclusive)
    assert keys["g_rows"] is queries["g_rows"] is g
    for given in (attend, queries, keys):
        assert given["EXCLUSIVE"] == exclusive
        assert given["MASK"] == (0 if mask is None else 3)
        assert given["mask_b"] == (0 if mask is None else 2 * TOKENS)
        assert given["POWERS"] == 2
        assert (given["shares"] is share) == exclusive
