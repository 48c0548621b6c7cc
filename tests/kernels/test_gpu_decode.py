"""The kernel for one decoded token on a GPU, against the dense operator and in plugged models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("transformers")

import transformers

import gfsa
from gfsa.kernels import decode as kernels
from gfsa.kernels import routes
from gfsa.kernels.decode import PreparedToken, decode
from gfsa.operators import Coefficients, DenseOperator
from support.decoders import decoder

BF16 = torch.bfloat16


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "dim"), [(1, 12, 1, 64), (16, 12, 1, 64), (3, 8, 4, 128)]
)
def test_lengths_that_change_from_token_to_token(
    batch: int, heads: int, group: int, dim: int, masked: bool, static: bool
) -> None:
    """Few compiled kernels serve every length: their rows are those of the dense operator."""
    torch.manual_seed(0)
    for length in (2, 17, 64, 65, 1000, 1024):
        make: Any = {"device": "cuda", "dtype": BF16}
        q = torch.randn(batch, heads, length, dim, **make)
        k, v = torch.randn(2, batch, heads // group, length, dim, **make).unbind(0)
        coeffs = torch.randn(heads, 3, device="cuda")
        keys = torch.ones(batch, 1, 1, length, dtype=torch.bool, device="cuda")
        if masked:
            keys[0, ..., : length // 3] = False
        exact = DenseOperator.from_qk(q.double(), k.double(), keys, is_causal=True)
        u = exact.apply(v.double())
        # with U as it is cached, rounded
        rounded = u.to(BF16)
        row = exact.matrix[:, :, -1:]
        second = row @ torch.cat([rounded[:, :, :-1].double(), u[:, :, -1:]], 2)
        own = v.repeat_interleave(group, 1).double()[:, :, -1:]
        c0, c1, c2 = coeffs.double()[:, :, None, None].unbind(1)
        wanted = c0 * own + c1 * u[:, :, -1:] + c2 * second
        past, mask, count = rounded.clone(), keys if masked else None, None
        past[:, :, -1] = float("nan")
        if static:
            k, v, past = (F.pad(x, (0, 0, 0, 24), value=float("nan")) for x in (k, v, past))
            mask = None if mask is None else F.pad(mask, (0, 24))
            count = torch.tensor(length, device="cuda")
        y = decode(q[:, :, -1:], k, v, past, coeffs, mask, count, dim**-0.5)
        # the new row is written, and no other
        assert torch.equal(past[:, :, : length - 1], rounded[:, :, :-1])
        assert past[:, :, length:].isnan().all()
        assert _error(past[:, :, length - 1 : length], u[:, :, -1:]) < 4e-3
        assert _error(y, wanted) < 8e-3


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "dim"),
    [(1, 12, 1, 64), (16, 12, 1, 64), (3, 8, 4, 128), (2, 4, 1, 80), (300, 1, 1, 16)],
)
def test_degree_one_at_lengths_that_change(
    batch: int, heads: int, group: int, dim: int, masked: bool, static: bool, dtype: torch.dtype
) -> None:
    """The dense operator's rows; at most twice what torch's plain attention is off."""
    torch.manual_seed(0)
    for length in (1, 2, 17, 64, 65, 1000, 1024):
        make: Any = {"device": "cuda", "dtype": dtype}
        q = torch.randn(batch, heads, 1, dim, **make)
        k, v = torch.randn(2, batch, heads // group, length, dim, **make).unbind(0)
        coeffs = torch.tensor([0.5, 0.5], device="cuda").expand(heads, 2)
        keys = torch.ones(batch, 1, 1, length, dtype=torch.bool, device="cuda")
        if masked:
            keys[0, ..., : length // 3] = False
        every_k, every_v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = q.double() @ every_k.double().mT * dim**-0.5
        attention = scores.masked_fill(~keys, -torch.inf).softmax(-1) @ every_v.double()
        plain = F.scaled_dot_product_attention(q, every_k, every_v, keys if masked else None)
        # both terms are of its size; of one token plain attention is exact, and rounding is not
        bound = 2 * _error(plain, attention) + 0.2 * torch.finfo(dtype).eps
        mask, count = keys if masked else None, None
        own = every_v[:, :, -1:].double()
        if static:
            k, v = (F.pad(x, (0, 0, 0, 24), value=float("nan")) for x in (k, v))
            mask = None if mask is None else F.pad(mask, (0, 24))
            count = torch.tensor(length, device="cuda")
        y = decode(q, k, v, None, coeffs, mask, count, dim**-0.5)
        assert _error(y, 0.5 * own + 0.5 * attention) <= bound, length


@pytest.mark.parametrize("degree", [1, 2])
def test_the_same_bits_on_two_streams_at_once(degree: int) -> None:
    """Programs add up in one order, whichever comes last; streams count separately."""
    torch.manual_seed(0)
    q, k, v, u = torch.randn(4, 2, 6, 1000, 64, device="cuda", dtype=BF16).unbind(0)
    others = (torch.randn(6, degree + 1, device="cuda"), None, None, 0.125)
    first = decode(q[:, :, -1:], k, v, u if degree == 2 else None, *others)
    streams = [torch.cuda.Stream() for _ in range(2)]
    # each writes the new row of its own cache
    caches = [u.clone(), u.clone()] if degree == 2 else [None, None]
    results = []
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, cache in zip(streams, caches, strict=True):
            with torch.cuda.stream(stream):
                results.append(decode(q[:, :, -1:], k, v, cache, *others))
    torch.cuda.synchronize()
    assert all(torch.equal(y, first) for y in results)
    assert all(cache is None or torch.equal(cache, u) for cache in caches)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("theta", [torch.float32, BF16])
def test_coefficients_of_a_filter(theta: torch.dtype, degree: int) -> None:
    """The kernel computes them from what the filter learns."""
    torch.manual_seed(0)
    q, k, v, u = torch.randn(4, 2, 6, 300, 64, device="cuda", dtype=BF16).unbind(0)
    rows, powers = u if degree == 2 else None, degree + 1
    for shape in ((2, powers), (6, 2, powers)):
        numbers = torch.randn(6, 2, device="cuda").to(theta)
        base, basis = torch.randn(6, powers, device="cuda"), torch.randn(shape, device="cuda")
        learned = Coefficients(numbers, base, basis)
        found = decode(q[:, :, -1:], k, v, rows, learned, None, None, 0.125)
        exact = learned._replace(theta=numbers.float()).value()
        wanted = decode(q[:, :, -1:], k, v, rows, exact, None, None, 0.125)
        assert _error(found, wanted.double()) < 4e-3


@pytest.mark.parametrize("degree", [1, 2])
def test_wide_heads_in_float32(degree: int) -> None:
    """What takes the most shared memory."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 500, 256, device="cuda").unbind(0)
    exact = DenseOperator.from_qk(q.double(), k.double(), is_causal=True)
    powers = exact.apply(v.double())
    coeffs = torch.randn(2, degree + 1, device="cuda")
    u = None
    if degree == 2:
        u = powers.float()
        u[:, :, -1] = float("nan")
    y = decode(q[:, :, -1:], k, v, u, coeffs, None, None, 1 / 16)
    assert u is None or _error(u, powers) < 1e-5
    assert _error(y, exact.polynomial(coeffs.double(), v.double())[:, :, -1:]) < 1e-5


def _error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm().clamp(min=1e-9))


# in place of a degree: the exclusive filter
EXCLUSIVE = 0


def plugged(kind: str, degree: int) -> Any:
    """With a window, if there is one, that prompts fit into, and the tokens after them do not."""
    sizes = {"width": 256, "heads": 4, "key_heads": 2, "layers": 4, "vocabulary": 512}
    model = decoder(kind, positions=1024, window=16, **sizes).cuda()
    if degree == EXCLUSIVE:
        gfsa.plug(model, filter=gfsa.Exclusive)
    elif degree == 1:
        gfsa.plug(model, K=None, w0=0.2, w1=0.9)
    else:
        gfsa.plug(model, K=3, w0=0.2, w1=0.9, wK=-0.3)
    return model


class Launched(list[torch.dtype]):
    """The dtypes of tokens for which the kernel was launched; some are named twice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run, prepared = kernels._run, PreparedToken.__call__

        def counted(token: kernels.Token, *arguments: Any, **options: Any) -> Tensor:
            self.append(token.q.dtype)
            return run(token, *arguments, **options)

        def counted_too(token: PreparedToken, q: Tensor, *arguments: Any) -> Tensor:
            self.append(q.dtype)
            return prepared(token, q, *arguments)

        monkeypatch.setattr(kernels, "_run", counted)
        monkeypatch.setattr(PreparedToken, "__call__", counted_too)


@pytest.mark.parametrize("degree", [1, 2, EXCLUSIVE])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("kind", "beams"), [("gpt2", 1), ("gpt2", 3), ("llama", 1), ("mistral", 1)]
)
def test_generation(
    kind: str,
    beams: int,
    cache: str,
    degree: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = plugged(kind, degree)
    launched = Launched(monkeypatch)
    ids = torch.randint(1, 512, (2, 9), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 30,
        "min_new_tokens": 30,
        "num_beams": beams,
        "do_sample": False,
        "cache_implementation": cache,
        "pad_token_id": 0,
    }
    by_kernel = model.generate(ids, **options)
    assert launched
    monkeypatch.setattr(routes, "DECODES_BY_KERNEL", False)
    launched.clear()
    assert torch.equal(by_kernel, model.generate(ids, **options))
    assert not launched


@pytest.mark.parametrize("degree", [1, 2])
def test_a_captured_step_of_a_static_cache(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the length from the device: each of them decodes the next token."""
    model = plugged("gpt2", degree)
    ids = torch.randint(1, 512, (2, 30), device="cuda")

    def filled() -> Any:
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        with torch.no_grad():
            model(ids[:, :20], past_key_values=cache)
        return cache

    cache, token = filled(), ids[:, 20:21].clone()
    position = torch.full((2, 1), 20, device="cuda")
    stream = torch.cuda.Stream()
    # which fills the token and its position
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        # compiled before it is captured; the token is decoded again below
        model(token, past_key_values=cache, position_ids=position)
    torch.cuda.synchronize()
    for layer in cache.layers:
        layer.cumulative_length.fill_(20)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        logits = model(token, past_key_values=cache, position_ids=position).logits
    got = []
    for step in range(20, 30):
        token.copy_(ids[:, step : step + 1])
        position.fill_(step)
        graph.replay()
        got.append(logits.clone())
    if degree == 1:
        # a number for each head beside keys and values, which each launch leaves at zero
        assert all(not hasattr(layer, "gfsa_powers") for layer in cache.layers)
        assert not any(layer.gfsa_counters.any() for layer in cache.layers)
        assert {len(layer.gfsa_counters) for layer in cache.layers} == {2 * 4}
    monkeypatch.setattr(routes, "DECODES_BY_KERNEL", False)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits[:, 20:30]
    torch.testing.assert_close(torch.cat(got, 1), wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_decoding_is_one_graph(mode: str, degree: int) -> None:
    model = plugged("gpt2", degree)
    torch._dynamo.reset()
    ids = torch.randint(1, 512, (2, 24), device="cuda")
    # rows that several programs share
    cache = transformers.StaticCache(config=model.config, max_cache_len=256)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    rows = []
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        for step in range(20, 24):
            position = torch.full((2, 1), step, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            output = compiled(ids[:, step : step + 1], past_key_values=cache, position_ids=position)
            # the next replay writes to the same memory
            rows.append(output.logits.clone())
        wanted = model(ids, use_cache=False).logits[:, 20:]
    torch.testing.assert_close(torch.cat(rows, 1), wanted, atol=2e-3, rtol=2e-3)


def test_compiled_decoding_of_degree_one_with_a_growing_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph has neither powers nor counters of a cache to write to."""
    model = plugged("gpt2", 1)
    launched = Launched(monkeypatch)
    ids = torch.randint(1, 512, (2, 300), device="cuda")
    cache = transformers.DynamicCache(config=model.config)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    rows = []
    with torch.no_grad():
        model(ids[:, :294], past_key_values=cache)
        for step in range(294, 300):
            position = torch.full((2, 1), step, device="cuda")
            output = compiled(ids[:, step : step + 1], past_key_values=cache, position_ids=position)
            rows.append(output.logits)
        assert launched
        wanted = model(ids, use_cache=False).logits[:, 294:]
    torch.testing.assert_close(torch.cat(rows, 1), wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_compiled_decoding_of_grouped_heads_in_bfloat16(
    kind: str, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two query heads for each of two key heads of 64 features, captured, against dense.

    The window of 16 tokens is full after four of the decoded ones.
    """
    model = plugged(kind, degree).to(BF16)
    exact = plugged(kind, degree).to(BF16).double()
    exact.set_attn_implementation("eager")
    ids = torch.randint(1, 512, (3, 24), device="cuda")
    prompt = 12
    launched = Launched(monkeypatch)

    def decoded(step: Any) -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=256)
        rows = []
        with torch.no_grad():
            model(ids[:, :prompt], past_key_values=cache)
            for at in range(prompt, ids.shape[1]):
                position = torch.full((3, 1), at, device="cuda")
                torch.compiler.cudagraph_mark_step_begin()
                output = step(ids[:, at : at + 1], past_key_values=cache, position_ids=position)
                # the next replay writes to the same memory
                rows.append(output.logits.clone())
        return torch.cat(rows, 1)

    torch._dynamo.reset()
    compiled = decoded(torch.compile(model, fullgraph=True, mode="reduce-overhead"))
    # it is the kernel that was captured, in each of the layers
    assert len(launched) >= model.config.num_hidden_layers
    assert set(launched) == {BF16}
    eager = decoded(model)
    with torch.no_grad():
        wanted = exact(ids, use_cache=False).logits[:, prompt:]
        monkeypatch.setattr(routes, "DECODES_BY_KERNEL", False)
        by_torch = decoded(model)
    errors = {"eager": _error(eager, wanted), "by torch": _error(by_torch, wanted)}
    print(errors, "compiled", _error(compiled, wanted))
    # the rounding of eight matrix products in bfloat16 a layer, and no more than without a compiler
    assert _error(compiled, wanted) <= 2 * max(errors.values())
    assert _error(compiled, wanted) < 0.05
    assert _error(compiled, eager.double()) < 0.05
