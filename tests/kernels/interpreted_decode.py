"""The decode kernel in the interpreter, against the dense operator and in plugged models.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import gfsa
from gfsa.kernels import decode as kernels
from gfsa.operators import AttentionCall, Coefficients, DenseOperator
from support.far_strides import PAST_INT32, spread

transformers = pytest.importorskip("transformers")

from gfsa.operators import past as cached  # noqa: E402
from support.decoders import decoder  # noqa: E402

assert support.triton_interpreter


def problem(
    batch: int, heads: int, group: int, length: int, dim: int, masked: bool, degree: int = 2
) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(batch, heads, length, dim)
    k, v = torch.randn(2, batch, heads // group, length, dim).unbind(0)
    keys = torch.ones(batch, 1, 1, length, dtype=torch.bool)
    if masked:
        keys[0, ..., : length // 3] = False
    return q, k, v, torch.randn(heads, degree + 1), keys


# each option with each other one
@pytest.mark.parametrize(
    ("degree", "exclusive", "static", "splits"),
    [(1, False, False, 1), (1, True, True, 4), (2, False, True, 1), (2, True, False, 4)],
)
@pytest.mark.parametrize(
    ("batch", "heads", "group", "length", "dim", "masked"),
    [(2, 2, 1, 70, 16, False), (2, 2, 2, 129, 24, True), (1, 2, 2, 1, 8, False)],
)
def test_the_new_row_of_the_dense_filter(
    batch: int,
    heads: int,
    group: int,
    length: int,
    dim: int,
    masked: bool,
    static: bool,
    splits: int,
    degree: int,
    exclusive: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one program a head, and by four, of which some have no keys."""
    monkeypatch.setattr(kernels, "tile_of", lambda *_: (16, 4))
    monkeypatch.setattr(kernels, "_splits", lambda *_: splits)
    q, k, v, coeffs, keys = problem(batch, heads, group, length, dim, masked, degree)
    exact = DenseOperator.from_qk(q.double(), k.double(), keys, is_causal=True)
    share = torch.randn(heads) if exclusive else None
    if exclusive:
        # a token without a direction of its own
        v[0, 0, -1] = 0.0
    taken = None if share is None else share.double()
    wanted = exact.polynomial(coeffs.double(), v.double(), taken)[:, :, -1:]
    powers = exact.apply(v.double())
    # U of the new token is not there yet
    u = powers.float().clone()
    u[:, :, -1] = float("nan")
    mask, count = keys if masked else None, None
    if static:
        # free rows after the newest token, which the kernel must not read
        k, v, u = (F.pad(x, (0, 0, 0, 5), value=float("nan")) for x in (k, v, u))
        mask = F.pad(keys, (0, 5)) if masked else None
        count = torch.tensor(length)
    given = u if degree == 2 else None
    options = (mask, count, dim**-0.5, None, share)
    y = kernels.decode(q[:, :, -1:], k, v, given, coeffs, *options)
    torch.testing.assert_close(y.double(), wanted, atol=5e-6, rtol=5e-6)
    if degree == 1:
        return
    # the row of the new token, and no other, has been written
    torch.testing.assert_close(u[:, :, :length].double(), powers, atol=2e-6, rtol=2e-6)
    assert u[:, :, length:].isnan().all()


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("rows", "length"), [(131072, 1), (131072, 2049), (2000, 2000)])
def test_a_cache_with_room_for_many_tokens(
    rows: int, length: int, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_splits", lambda *_: kernels.MOST_SPLITS)
    q, k, v = torch.randn(3, 1, 1, length, 8).unbind(0)
    coeffs = torch.randn(1, degree + 1)
    # the dense formula's last row
    exact = (q[:, :, -1:].double() @ k.double().mT * 8**-0.5).softmax(-1)
    # powers of past tokens may be any: what the kernel adds up are rows of numbers
    u = torch.randn_like(v)
    first = exact @ v.double()
    second = exact @ torch.cat([u[:, :, :-1].double(), first], 2)
    c0, c1, *c2 = coeffs.double()[0]
    wanted = c0 * v[:, :, -1:].double() + c1 * first + (c2[0] * second if c2 else 0.0)
    k, v, u = (F.pad(x, (0, 0, 0, rows - length), value=float("nan")) for x in (k, v, u))
    u[:, :, length - 1] = float("nan")
    powers = u if degree == 2 else None
    count = torch.tensor(length)
    y = kernels.decode(q[:, :, -1:], k, v, powers, coeffs, None, count, 8**-0.5)
    torch.testing.assert_close(y.double(), wanted, atol=5e-6, rtol=5e-6)
    if degree == 2:
        new = u[:, :, length - 1 : length].double()
        torch.testing.assert_close(new, first, atol=2e-6, rtol=2e-6)
        assert u[:, :, length:].isnan().all()


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("theta", [torch.float32, torch.bfloat16])
def test_coefficients_of_a_filter(by_head: bool, theta: torch.dtype, degree: int) -> None:
    """The kernel computes them from what the filter learns."""
    q, k, v, _, _ = problem(2, 4, 1, 20, 8, False)
    basis = torch.randn(*([4] if by_head else []), 2, degree + 1)
    learned = Coefficients(torch.randn(4, 2).to(theta), torch.randn(4, degree + 1), basis)
    u, again = None, None
    if degree == 2:
        # each call writes into its own
        u = torch.randn_like(v)
        again = u.clone()
    found = kernels.decode(q[:, :, -1:], k, v, u, learned, None, None, 0.3)
    # in float32, as the kernel computes them
    exact = learned._replace(theta=learned.theta.float()).value()
    wanted = kernels.decode(q[:, :, -1:], k, v, again, exact, None, None, 0.3)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 4])
def test_the_rounding_of_degree_one(
    dtype: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most twice what plain attention is off in the same dtype."""
    monkeypatch.setattr(kernels, "_splits", lambda *_: splits)
    q, k, v, _, _ = (x.to(dtype) for x in problem(2, 4, 2, 200, 16, False, 1))
    dense = DenseOperator.from_qk(q.double(), k.double(), is_causal=True)
    q = q[:, :, -1:]
    plain = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def error(y: Tensor, c0: float, c1: float) -> float:
        wanted = dense.polynomial(torch.tensor([c0, c1]).double(), v.double())[:, :, -1:]
        return float((y.double() - wanted).norm() / wanted.norm())

    # ordinary attention, and a filter whose terms have that size
    for c0, c1 in ((0.0, 1.0), (0.5, 0.5)):
        y = kernels.decode(q, k, v, None, torch.tensor([c0, c1]), None, None, 16**-0.5)
        assert error(y, c0, c1) <= 2 * error(plain, 0.0, 1.0)


def test_powers_belong_to_degree_two() -> None:
    """Without U the kernel would read memory that is not there."""
    q, k, v, coeffs, _ = problem(1, 2, 1, 9, 8, False)
    with pytest.raises(AssertionError):
        kernels.decode(q[:, :, -1:], k, v, None, coeffs, None, None, 0.3)


def test_one_row_of_coefficients_for_all_heads() -> None:
    q, k, v, coeffs, _ = problem(1, 2, 1, 9, 8, False)
    arguments = (q[:, :, -1:], k, v, torch.randn_like(v))
    one = kernels.decode(*arguments, coeffs[0], None, None, 0.3)
    each = kernels.decode(*arguments, coeffs[:1].expand(2, 3), None, None, 0.3)
    assert torch.equal(one, each)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["k", "v", "u"])
def test_cached_tokens_may_lie_far_apart(which: int) -> None:
    """A step from token to token that 32 bits cannot count, in a cache that is a view."""
    q, *cache, coeffs, keys = problem(1, 2, 1, 2, 8, False)
    q, cache = q[:, :, -1:].half(), [x.half() for x in (*cache, torch.randn_like(cache[1]))]
    apart = list(cache)
    apart[which] = spread(cache[which], 2)
    assert apart[which].stride(2) >= PAST_INT32
    if which < 2:
        # each call writes into its own
        apart[2] = cache[2].clone()
    expected = kernels.decode(q, *cache, coeffs, keys, None, 0.3)
    found = kernels.decode(q, *apart, coeffs, spread(keys, -1), None, 0.3)
    assert torch.equal(found, expected)
    assert torch.equal(apart[2], cache[2])


def test_numbers_of_64_bits_have_code_of_their_own() -> None:
    """A number that 32 bits hold is compiled as one of 32 bits, and the code is kept."""
    small, large = (0.3, 2, 5, 100), (0.3, 2, 2**31, 100)
    assert kernels.wide_numbers(small) == ()
    assert kernels.wide_numbers(large) == (False, False, True, False)
    launches = [
        kernels._launch((2, 1, 1), (kernels.wide_numbers(x),), (), 4) for x in (small, large)
    ]
    keys = {launch.key for launch in launches}
    assert len(keys) == 2


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_token_that_sees_nothing(
    splits: int, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_splits", lambda *_: splits)
    q, k, v, coeffs, keys = problem(1, 2, 1, 9, 8, False, degree)
    nothing = torch.zeros_like(keys)
    u = torch.ones_like(v) if degree == 2 else None
    y = kernels.decode(q[:, :, -1:], k, v, u, coeffs, nothing, None, 0.3)
    assert u is None or not u[:, :, -1].any()
    torch.testing.assert_close(y, coeffs[None, :, :1, None] * v[:, :, -1:])


@pytest.mark.parametrize("degree", [1, 2])
def test_counters_are_zero_again(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch counts from zero."""
    counters = kernels.new_counters(2, torch.device("cpu"))
    monkeypatch.setattr(kernels, "_splits", lambda *_: 2)
    q, k, v, coeffs, _ = problem(1, 2, 1, 100, 8, False, degree)
    u = torch.randn_like(v) if degree == 2 else None
    arguments = (q[:, :, -1:], k, v, u, coeffs, None, None, 0.3)
    first, again = kernels.decode(*arguments, counters), kernels.decode(*arguments, counters)
    assert not counters.any()
    assert torch.equal(first, again)
    counters.fill_(5)
    kernels.decode(*arguments, counters)
    # these are the counters that count: from five on, neither program comes last
    assert counters.tolist() == [7, 7]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "in a graph"])
def test_a_compiled_graph_keeps_no_room(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would find memory of its CUDA graphs in use that is no result of theirs."""
    kept: list[bool] = []
    room = kernels._room

    def watched(*arguments: Any) -> Any:
        kept.append(arguments[-1])
        return room(*arguments)

    monkeypatch.setattr(kernels, "_room", watched)
    monkeypatch.setattr(kernels, "_splits", lambda *_: 2)
    monkeypatch.setattr(kernels, "needs_registered_operator", lambda q: graph)
    q, k, v, coeffs, _ = problem(1, 2, 1, 9, 8, False)
    kernels.decode(q[:, :, -1:], k, v, torch.randn_like(v), coeffs, None, None, 0.3)
    assert kept == [not graph]


@pytest.mark.parametrize("degree", [1, 2])
def test_inputs_of_a_graph_may_begin_anywhere(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel loads 16 bytes at a time."""
    q, k, v, coeffs, _ = problem(1, 2, 1, 9, 8, False, degree)
    u = torch.randn_like(v)
    arguments: list[Any] = [q[:, :, -1:].clone(), k, v, u]
    off: list[Any]
    off = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in arguments]
    assert all(x.data_ptr() % 16 for x in off)
    if degree == 1:
        arguments[3] = off[3] = None
    expected = kernels.decode(*arguments, coeffs, None, None, 0.3)
    run = kernels._run

    def checked(token: kernels.Token, *rest: Any, **options: Any) -> Any:
        assert not any(x.data_ptr() % 16 for x in token[:4] if x is not None)
        return run(token, *rest, **options)

    monkeypatch.setattr(kernels, "_run", checked)
    found = kernels.registered(*off, None, coeffs, None, None, None, None, 0.3, False)
    assert torch.equal(found, expected)
    if degree == 2:
        assert torch.equal(off[3], u)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("static", [False, True])
def test_the_registered_operator(static: bool, degree: int) -> None:
    q, k, v, coeffs, keys = problem(1, 2, 1, 9, 8, True, degree)
    u = torch.randn_like(v) if degree == 2 else None
    learned: tuple[Any, ...] = (None, coeffs, None)
    if static:
        learned = (torch.randn(2, 2), coeffs, torch.randn(2, degree + 1))
    count: tuple[Any, ...] = (None, None)
    if static:
        counters = kernels.new_counters(2, torch.device("cpu"))
        count = (torch.tensor(7), counters)
    arguments = (q[:, :, -1:], k, v, u, *learned, keys, *count, 0.3, False)
    # it has no gradient, and dynamic shapes are those of the cache
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.registered, arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("way", "prompt"),
    [
        # before the window is full, when it is, and after
        ("eager", 1),
        ("eager", 4),
        ("decided once", 2),
        ("decided once", 6),
        ("compiled", 1),
    ],
)
@pytest.mark.parametrize("degree", [1, 2])
def test_a_static_window_before_and_after_it_is_full(
    prompt: int, way: str, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a window of 4 fill up, then move for each token; powers move with them."""
    subject = model("mistral", degree=degree)
    tokens = 8
    ids = torch.randint(1, 32, (2, tokens))
    padding = torch.ones_like(ids)
    padding[0, 0] = 1 if prompt == 1 else 0
    with torch.no_grad():
        wanted = subject(ids, attention_mask=padding, use_cache=False).logits[:, prompt:]
    launched: list[bool] = []
    run = kernels._run

    def noted(token: kernels.Token, *rest: Any, **options: Any) -> Any:
        launched.append(token.length is not None)
        return run(token, *rest, **options)

    monkeypatch.setattr(kernels, "_run", noted)
    monkeypatch.setattr(cached, "refusal_of_decoding", lambda *_: None)
    if way == "decided once":
        monkeypatch.setattr(cached.attention, "host_time_counts", lambda *_: True)
        monkeypatch.setattr(cached, "_PREPARED", cached.DecisionCache())
    step = subject
    if way == "compiled":
        torch._dynamo.reset()
        step = torch.compile(subject, backend="aot_eager", fullgraph=True)
    cache = transformers.StaticCache(config=subject.config, max_cache_len=tokens)
    (layer,) = cache.layers
    assert type(layer) is transformers.cache_utils.StaticSlidingWindowLayer
    rows = []
    with torch.no_grad():
        mask = padding[:, :prompt]
        subject(ids[:, :prompt], attention_mask=mask, past_key_values=cache)
        for end in range(prompt + 1, tokens + 1):
            token, position = ids[:, end - 1 : end], torch.full((2, 1), end - 1)
            past = {"attention_mask": padding[:, :end], "past_key_values": cache}
            rows.append(step(token, position_ids=position, **past).logits)
    torch.testing.assert_close(torch.cat(rows, 1), wanted, atol=2e-5, rtol=2e-5)
    # with degree 1, which needs no powers of a past, a prompt of one token is a launch as well
    first = 1 if degree == prompt == 1 else prompt + 1
    # the length is on the device until the window is full, and is the window's from then on
    assert launched == [end <= 4 for end in range(first, tokens + 1)]


def model(kind: str, layers: int = 1, degree: int = 2, exclusive: bool = False) -> Any:
    sizes = {"width": 16, "heads": 2, "key_heads": 1, "vocabulary": 32, "positions": 64}
    built = decoder(kind, layers=layers, window=4, **sizes)
    given = {"K": None} if degree == 1 else {"K": 3, "wK": -0.3}

    def make(heads: int) -> gfsa.GFSA:
        made = gfsa.GFSA(heads, w0=0.2, w1=0.9, **given)
        return made.exclude(0.7, learn=True) if exclusive else made

    gfsa.plug(built, filter=make)
    return built


def counted(counts: dict[str, int], name: str, function: Any) -> Any:
    """The function, which counts its calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("kind", "cache", "beams", "degree", "exclusive"),
    [
        ("gpt2", "dynamic", 1, 1, True),
        ("gpt2", "dynamic", 1, 2, False),
        ("llama", "static", 1, 2, True),
        ("llama", "dynamic", 2, 1, False),
        ("llama", "dynamic", 2, 2, True),
        ("mistral", "dynamic", 1, 2, False),
        ("mistral", "static", 1, 1, True),
        ("mistral", "static", 1, 2, False),
    ],
)
def test_generation_by_one_launch_a_layer_and_token(
    kind: str,
    cache: str,
    beams: int,
    degree: int,
    exclusive: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = model(kind, degree=degree, exclusive=exclusive)
    ids = torch.randint(1, 32, (2, 5))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 3,
        "min_new_tokens": 3,
        "do_sample": False,
        "num_beams": beams,
        "cache_implementation": cache,
        "output_scores": True,
        "return_dict_in_generate": True,
        "disable_compile": True,
    }
    by_torch = subject.generate(ids, **options)
    counts = {"kernel": 0, "torch": 0}
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(kernels, "_run", counted(counts, "kernel", kernels._run))
    monkeypatch.setattr(cached, "refusal_of_decoding", lambda *_: None)
    by_kernel = subject.generate(ids, **options)
    assert torch.equal(by_kernel.sequences, by_torch.sequences)
    for got, wanted in zip(by_kernel.scores, by_torch.scores, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    # one layer; the first of three tokens is that of the prompt
    assert counts["kernel"] == 2
    monkeypatch.setattr(AttentionCall, "reason_for_torch_alone", lambda call: None)
    watched = counted(counts, "torch", attend)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    past = transformers.DynamicCache(config=subject.config)
    with torch.no_grad():
        subject(ids, past_key_values=past)
        counts["torch"] = 0
        subject(ids[:, :1], past_key_values=past)
    assert counts["torch"] == 0


@pytest.mark.parametrize(
    ("kind", "cache", "degree"),
    [
        ("gpt2", "dynamic", 1),
        ("gpt2", "dynamic", 2),
        ("llama", "static", 2),
        ("mistral", "static", 1),
    ],
)
def test_layers_share_the_decision_about_a_token(
    kind: str, cache: str, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU in eager mode; a decision holds for calls that are alike, and for no others."""
    subject = model(kind, layers=2, degree=degree)
    ids = torch.randint(1, 32, (2, 6))
    options = {
        "max_new_tokens": 3,
        "min_new_tokens": 3,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    wanted = subject.generate(ids, **options)
    counts = {"decided": 0, "launched": 0}
    monkeypatch.setattr(cached, "_decoder", counted(counts, "decided", cached._decoder))
    monkeypatch.setattr(kernels, "_run", counted(counts, "launched", kernels._run))
    monkeypatch.setattr(cached.attention, "host_time_counts", lambda *_: True)
    monkeypatch.setattr(cached, "_PREPARED", cached.DecisionCache())
    # torch's calls serve on a CPU, and that is remembered as well
    assert torch.equal(subject.generate(ids, **options), wanted)
    # two tokens beside the prompt's; a static cache and a full window have one length
    lengths = 2 if kind == "gpt2" else 1
    assert counts == {"decided": lengths, "launched": 0}
    monkeypatch.setattr(cached, "refusal_of_decoding", lambda *_: None)
    assert torch.equal(subject.generate(ids, **options), wanted)
    assert counts == {"decided": lengths, "launched": 0}
    cached._PREPARED.clear()
    assert torch.equal(subject.generate(ids, **options), wanted)
    assert counts == {"decided": 2 * lengths, "launched": 2 * 2}
    # sequences, dtypes and switches are part of what was decided
    monkeypatch.setattr(cached.routes, "DECODES_BY_KERNEL", False)
    subject.generate(ids, **options)
    monkeypatch.setattr(cached.routes, "DECODES_BY_KERNEL", True)
    assert counts["decided"] == 3 * lengths
    past = transformers.DynamicCache(config=subject.config)
    with torch.no_grad():
        subject(ids[:1], past_key_values=past)
        subject(ids[:1, :1], past_key_values=past)
        assert counts["decided"] == 3 * lengths + 1
        if degree == 1:
            # no powers, which could be those of another past
            return
        # another user of the cache is noticed all the same
        gfsa.unplug(subject)
        subject(ids[:1, :1], past_key_values=past)
        gfsa.plug(subject, K=3)
        with pytest.raises(ValueError, match="but the powers of"):
            subject(ids[:1, :1], past_key_values=past)
