"""Prepared launches: their signatures, and what the kernels are given; without a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import gfsa
from gfsa.kernels import coefficients, launching, short
from gfsa.kernels import decode as kernels
from gfsa.kernels.decode import PreparedToken
from gfsa.kernels.degree_one import combine_degree_one
from gfsa.kernels.launching import Forward, Inputs, Launch, Options, Prepared, Saved
from gfsa.kernels.op import FusedOperator, kernels_for
from gfsa.operators import AttentionCall, AttentionOperator, Coefficients
from support.nothing_launched import nothing_launched, without_c_functions

BF16 = torch.bfloat16


def tokens(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


COEFFS = torch.ones(4, 3)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Prepared]:
    """The launches of each call."""
    found: list[Prepared] = []
    run = Prepared.__call__

    def note(prepared: Prepared, given: Any) -> Any:
        found.append(prepared)
        return run(prepared, given)

    monkeypatch.setattr(Prepared, "__call__", note)
    return found


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Forward:
    return short.forward(Inputs(q, k, v, COEFFS, mask, None, Options(0.125)))


def test_one_for_each_signature() -> None:
    x = tokens(2, 4, 40, 64)
    other_layout = tokens(2, 40, 4, 64).transpose(1, 2)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    known = short._FORWARD.known
    with nothing_launched():
        for _ in range(2):
            forward(x.clone(), x, x)
            assert len(known) == 1
        forward(other_layout, x, x)
        forward(x, other_layout, x)
        forward(x, x, x, mask)
        forward(x, x, x, mask.expand(2, 1, 40, 40))
        forward(x[:1], x[:1], x[:1])
        forward(x[:, :, :39], x[:, :, :39], x[:, :, :39])
        assert len(known) == 7


def test_one_head_compiled_with_an_exclusive_term() -> None:
    """Its gradients are tensors of their own: torch refuses operators that return views."""
    q = torch.zeros(2, 1, 512, 64, dtype=torch.bfloat16, requires_grad=True)
    coeffs, share = torch.ones(1, 2, requires_grad=True), torch.ones(1, requires_grad=True)

    def step(q: Tensor, coeffs: Tensor, share: Tensor) -> Tensor:
        options = {"is_causal": True, "backend": "fused"}
        return gfsa.graph_filter_attention(q, q, q, coeffs, exclusive=share, **options)

    torch._dynamo.reset()
    with nothing_launched():
        torch.compile(step, fullgraph=True, backend="aot_eager")(q, coeffs, share).sum().backward()
    assert coeffs.grad is not None
    assert share.grad is not None


def test_what_is_kept_is_not_of_a_graph_that_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's compiler takes the memory that a thread allocates meanwhile for its CUDA graphs."""
    allocating: list[int] = []
    zeros = torch.zeros

    def watched(*arguments: Any, **options: Any) -> Tensor:
        allocating.append(threading.get_ident())
        return zeros(*arguments, **options)

    monkeypatch.setattr(short, "_ZEROS", {})
    monkeypatch.setattr(torch, "zeros", watched)
    zero = short.zero(torch.device("cpu"))
    assert short.zero(torch.device("cpu")) is zero
    assert zero.dtype == torch.int32
    assert zero.tolist() == [0]
    assert len(allocating) == 1
    assert threading.get_ident() not in allocating


def test_launches_prepared_in_a_captured_graph_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The zero that they read is of the graph, whose replays alone make it zero."""
    x = tokens(2, 4, 41, 64)
    zero, known = short.zero, short._FORWARD.known
    with nothing_launched():
        monkeypatch.setattr(short, "zero", lambda device: torch.ones(1, dtype=torch.int32))
        forward(x, x, x)
        assert not known
        monkeypatch.setattr(short, "zero", zero)
        forward(x, x, x)
        (prepared,) = known.values()
        assert prepared.rooms[-1]().tolist() == [0]


def test_what_the_copy_engine_does_not_take_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(1, 2, 40, 64)
    off_the_border = tokens(1, 2, 40, 65)[..., 1:]
    given: list[Any] = []
    launch = Prepared.__call__

    def note(prepared: Prepared, tensors: Any) -> Any:
        given.append(tensors)
        return launch(prepared, tensors)

    monkeypatch.setattr(Prepared, "__call__", note)
    with nothing_launched():
        forward(x, x.expand(1, 2, 40, 64), x)
        forward(off_the_border, x, x)
        forward(x, tokens(1, 1, 40, 64).expand(1, 2, 40, 64), x)
    for (q, k, v, *_), copied in zip(given, ([], [0], [1]), strict=True):
        assert [i for i, y in enumerate((q, k, v)) if y.data_ptr() != x.data_ptr()] == copied
        assert all(launching.copyable_by_tile(y) is y for y in (q, k, v))


def test_results_lie_as_the_tokens_do() -> None:
    q, k = tokens(2, 40, 4, 64).transpose(1, 2), tokens(2, 4, 40, 64)
    with nothing_launched():
        out, u, lse = forward(q, k, k)
        gradients = short.backward(out, Saved(q, k, k, u, out, lse, COEFFS), Options(0.125))
    assert out.stride() == u.stride() == q.stride()
    assert [x.stride() for x in gradients[:3]] == [x.stride() for x in (q, k, k)]
    assert gradients[3].shape == (4, 3, 2 * 64)


def test_saved_tensors_in_another_layout_are_noticed(ran: list[Prepared]) -> None:
    """Hooks on saved tensors may copy them; strides that were settled no longer hold then."""
    x = tokens(2, 4, 40, 64)
    other_layout = tokens(2, 40, 4, 64).transpose(1, 2)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool).expand(2, 1, 40, 40)
    with nothing_launched():
        out, u, lse = forward(x, x, x, mask)
        kept = Saved(x, x, x, u, out, lse, COEFFS, mask)
        for g, saved in [
            (out, kept),
            (out, kept._replace(mask=mask.contiguous())),
            (out, kept._replace(k=other_layout)),
            (other_layout, kept),
        ]:
            for _ in range(2):
                short.backward(g, saved, Options(0.125))
            assert ran[-1] is ran[-2]
            ((launch, _, _),) = ran[-1].steps
            # what the copy engine is told of k and g, the second and the sixth tensor
            strides = [launch.direct.tiles[place][1][5] for place in (1, 5)]
            assert strides == [saved.k.stride(), g.stride()]
        # copied, so laid out as the first one
        short.backward(out.sum().expand(out.shape), kept, Options(0.125))
    assert len({id(each) for each in ran[1:]}) == 4


def test_a_filter_of_degree_one_takes_the_short_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second pass of weight zero; θ's gradient is that of its own two powers."""
    q, layer = tokens(2, 4, 40, 64).requires_grad_(), gfsa.GFSA(4, K=None)
    seen: list[torch.Size] = []
    launches = short._FORWARD

    def recording(tiles: Any, pointers: Any, *others: Any) -> Any:
        seen.append(pointers[0].shape)
        return launches(tiles, pointers, *others)

    monkeypatch.setattr(short, "_FORWARD", recording)
    with nothing_launched():
        y = layer(AttentionOperator(q, q), q)
        dq, dtheta = torch.autograd.grad(y, [q, layer.theta], torch.zeros_like(y))
        polynomial = gfsa.graph_filter_attention(q, q, q, torch.tensor([0.1, 0.9]))
    assert seen == [(4, 3), (4, 3)]
    assert dq.shape == polynomial.shape == q.shape
    assert dtheta.shape == layer.theta.shape


def test_a_mask_broadcast_over_keys_is_laid_out_for_the_kernels() -> None:
    """As compiled models of transformers make it where nothing is hidden."""
    x, mask = tokens(2, 4, 40, 64), (torch.rand(2, 1, 40, 1) < 0.5).expand(2, 1, 40, 40)
    laid_out = FusedOperator(AttentionCall(x, x, mask)).mask
    assert torch.equal(laid_out, mask)
    with nothing_launched():
        assert kernels_for(x, mask, Options(0.125)).forward == "two_pass"
        assert kernels_for(x, laid_out, Options(0.125)).forward == "short"
    # others are given on as they are
    keys = torch.ones(2, 1, 1, 40, dtype=torch.bool).expand(2, 4, 40, 40)
    assert FusedOperator(AttentionCall(x, x, keys)).mask is keys


def test_a_tensor_is_described_once_for_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MOST_DESCRIPTORS", 4)
    asked: list[int] = []
    launched: list[tuple[Any, ...]] = []
    with nothing_launched():
        forward(*[tokens(2, 4, 40, 64)] * 3)
        (prepared,) = short._FORWARD.known.values()
        launch: Any = prepared.steps[0][0].direct
        monkeypatch.setattr(launch, "encode", lambda at, *_: asked.append(at) or f"at {at}")
        monkeypatch.setattr(launch, "c_launcher", lambda *given: launched.append(given))
        for _, _, known in launch.tiles:
            known.clear()
        places = [tokens(2, 4, 40, 64) for _ in range(9)]
        for q in [*places, *places[::-1]]:
            forward(q, places[0], places[0])
            assert launched[-1][launch.tiles[0][0]] == f"at {q.data_ptr()}"
    first, keys = launch.tiles[0][2], launch.tiles[1][2]
    assert 0 < len(first) <= 4
    assert keys[places[0].data_ptr()] == f"at {places[0].data_ptr()}"
    # keys and values stay where they are, and are described once
    assert asked.count(places[0].data_ptr()) <= 2 + 2


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("kind", ["given", "learned"])
def test_torchs_attention_gets_a_gradient_laid_out_as_without_a_filter(
    kind: str, exclusive: bool
) -> None:
    v, u = (torch.zeros(2, 4, 40, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    g = torch.zeros(2, 40, 4, 16, dtype=torch.bfloat16).transpose(1, 2)
    numbers = torch.zeros(4, 2, requires_grad=True)
    learned = Coefficients(numbers, torch.zeros(4, 2), torch.eye(2))
    share = torch.zeros(4, requires_grad=True) if exclusive else None
    given = v, u, learned if kind == "learned" else numbers, share
    with nothing_launched():
        with torch.no_grad():
            assert combine_degree_one(*given).stride() == u.stride()
        wanted = [v, u, numbers, *([] if share is None else [share])]
        found = torch.autograd.grad(combine_degree_one(*given), wanted, g)
    assert [x.shape for x in found] == [x.shape for x in wanted]
    assert found[1].stride() == g.stride()


def test_coefficients_are_made_where_their_numbers_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's layers may lie on another GPU than the current one."""
    seen: list[Tensor] = []
    monkeypatch.setattr(coefficients, "on_device_of", lambda x, *_: seen.append(x))
    theta, parts, basis = torch.zeros(4, 2), torch.zeros(4, 3, 8), torch.zeros(2, 3)
    coefficients.evaluate(Coefficients(theta, torch.zeros(4, 3), basis))
    for given in (basis, None):
        coefficients.gradients(parts, given, 3, True, False)
    assert [x is y for x, y in zip(seen, (theta, parts, parts), strict=True)] == [True] * 3


STREAM = 7
# where the C launcher's arguments begin: 13 of the launch, then the kernel's own
POINTERS = 13
RESULT = POINTERS + 9
NUMBERS = POINTERS + 12


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The C launcher's arguments, launch by launch; all code counts as compiled."""
    arguments: list[tuple[Any, ...]] = []
    made = kernels._launch.__wrapped__

    def compiled(*given: Any) -> Launch:
        launch = made(*given)
        direct = launch.direct = without_c_functions(launch, ())
        direct.c_launcher = lambda *given: arguments.append(given)
        direct.stream = lambda index: STREAM
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
    assert found[-2:] == [degree, False]
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
