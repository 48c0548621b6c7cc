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
from gfsa.operators import DenseOperator
from gfsa.operators.fused import decode as kernels
from support.far_strides import PAST_INT32, spread

transformers = pytest.importorskip("transformers")

from gfsa.plugs.adapters.transformers import cache as caches  # noqa: E402

assert support.triton_interpreter


def problem(
    batch: int, heads: int, group: int, length: int, dim: int, masked: bool
) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(batch, heads, length, dim)
    k, v = torch.randn(2, batch, heads // group, length, dim).unbind(0)
    keys = torch.ones(batch, 1, 1, length, dtype=torch.bool)
    if masked:
        keys[0, ..., : length // 3] = False
    return q, k, v, torch.randn(heads, 3), keys


@pytest.mark.parametrize(
    ("batch", "heads", "group", "length", "dim", "masked"),
    [(2, 4, 1, 70, 16, False), (2, 4, 2, 129, 24, True), (1, 2, 2, 1, 8, False)],
)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
def test_the_new_row_of_the_dense_filter(
    batch: int,
    heads: int,
    group: int,
    length: int,
    dim: int,
    masked: bool,
    static: bool,
    splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one program a head, and by four, of which some have no keys."""
    monkeypatch.setattr(kernels, "KEYS", 16)
    monkeypatch.setattr(kernels, "_splits", lambda *_: splits)
    q, k, v, coeffs, keys = problem(batch, heads, group, length, dim, masked)
    exact = DenseOperator.from_qk(q.double(), k.double(), keys, is_causal=True)
    wanted = exact.polynomial(coeffs.double(), v.double())[:, :, -1:]
    powers = exact.apply(v.double())
    # U of the new token is not there yet
    u = powers.float().clone()
    u[:, :, -1] = float("nan")
    mask, place = keys if masked else None, None
    if static:
        # free rows after the newest token, which the kernel must not read
        k, v, u = (F.pad(x, (0, 0, 0, 5), value=float("nan")) for x in (k, v, u))
        mask = F.pad(keys, (0, 5)) if masked else None
        place = torch.tensor(length - 1)
    y, new = kernels.decode(q[:, :, -1:], k, v, u, coeffs, mask, place, dim**-0.5)
    torch.testing.assert_close(new.double(), powers[:, :, -1:], atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(y.double(), wanted, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["k", "v", "u"])
def test_cached_tokens_may_lie_far_apart(which: int) -> None:
    """A step from token to token that 32 bits cannot count, in a cache that is a view."""
    q, *cache, coeffs, keys = problem(1, 2, 1, 2, 8, False)
    q, cache = q[:, :, -1:].half(), [x.half() for x in (*cache, torch.randn_like(cache[1]))]
    expected = kernels.decode(q, *cache, coeffs, keys, None, 0.3)
    cache[which] = spread(cache[which], 2)
    assert cache[which].stride(2) >= PAST_INT32
    found = kernels.decode(q, *cache, coeffs, spread(keys, -1), None, 0.3)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_numbers_of_64_bits_have_code_of_their_own() -> None:
    """A number that 32 bits hold is compiled as one of 32 bits, and the code is kept."""
    small, large = (0.3, 2, 5, 100), (0.3, 2, 2**31, 100)
    assert kernels.wide_numbers(small) == ()
    assert kernels.wide_numbers(large) == (False, False, True, False)
    common = (2, 8, True, False, 1, torch.float32, torch.device("cpu"))
    keys = {kernels._launch(*common, kernels.wide_numbers(x)).key for x in (small, large)}
    assert len(keys) == 2


@pytest.mark.parametrize("splits", [1, 2])
def test_a_token_that_sees_nothing(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_splits", lambda *_: splits)
    q, k, v, coeffs, keys = problem(1, 2, 1, 9, 8, False)
    nothing = torch.zeros_like(keys)
    y, u = kernels.decode(q[:, :, -1:], k, v, torch.zeros_like(v), coeffs, nothing, None, 0.3)
    assert not u.any()
    torch.testing.assert_close(y, coeffs[None, :, :1, None] * v[:, :, -1:])


@pytest.mark.parametrize(
    ("heads", "length", "processors", "splits"),
    [
        (12, 1023, 132, 16),
        (192, 1023, 132, 2),
        (600, 1023, 132, 1),
        (12, 64, 132, 1),
        (1, 8192, 132, 32),
    ],
)
def test_programs_fill_the_gpu(
    heads: int, length: int, processors: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "multiprocessors", lambda index: processors)
    assert kernels._splits(heads, length, torch.device("cuda", 0)) == splits


def test_counters_are_zero_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch of the same stream counts from zero."""
    counters = torch.zeros(2, dtype=torch.int32)
    room = kernels._room
    monkeypatch.setattr(kernels, "_room", lambda *args: (room(*args)[0], counters))
    monkeypatch.setattr(kernels, "_splits", lambda *_: 2)
    q, k, v, coeffs, _ = problem(1, 2, 1, 100, 8, False)
    arguments = (q[:, :, -1:], k, v, torch.randn_like(v), coeffs, None, None, 0.3)
    first, again = kernels.decode(*arguments), kernels.decode(*arguments)
    assert not counters.any()
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "in a graph"])
def test_a_compiled_graph_keeps_no_counters(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would find memory of its CUDA graphs in use that is no result of theirs."""
    kept: list[bool] = []
    room = kernels._room

    def watched(*arguments: Any) -> Any:
        kept.append(arguments[-1])
        return room(*arguments)

    monkeypatch.setattr(kernels, "_room", watched)
    monkeypatch.setattr(kernels, "needs_registered_operator", lambda q: graph)
    q, k, v, coeffs, _ = problem(1, 2, 1, 9, 8, False)
    kernels.decode(q[:, :, -1:], k, v, torch.randn_like(v), coeffs, None, None, 0.3)
    assert kept == [not graph]


def test_inputs_of_a_graph_may_begin_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel loads 16 bytes at a time."""
    q, k, v, coeffs, _ = problem(1, 2, 1, 9, 8, False)
    u = torch.randn_like(v)
    arguments = [q[:, :, -1:].clone(), k, v, u]
    expected = kernels.decode(*arguments, coeffs, None, None, 0.3)
    off = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in arguments]
    assert all(x.data_ptr() % 16 for x in off)
    run = kernels._run

    def checked(*arguments: Any, **options: Any) -> Any:
        assert not any(x.data_ptr() % 16 for x in arguments[:4])
        return run(*arguments, **options)

    monkeypatch.setattr(kernels, "_run", checked)
    found = kernels.registered(*off, coeffs, None, None, 0.3)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_the_registered_operator() -> None:
    q, k, v, coeffs, keys = problem(1, 2, 1, 9, 8, True)
    arguments = (q[:, :, -1:], k, v, torch.randn_like(v), coeffs, keys, None, 0.3)
    # it has no gradient, and dynamic shapes are those of the cache
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.registered, arguments, test_utils=checks)


def model(kind: str) -> Any:
    torch.manual_seed(0)
    common = {"vocab_size": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=64, **common)
        built = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.MistralConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=4 if kind == "mistral" else None,
            max_position_embeddings=64,
            **common,
        )
        built = transformers.MistralForCausalLM(config)
    gfsa.plug(built.eval(), K=3, w0=0.2, w1=0.9, wK=-0.3)
    return built


@pytest.mark.parametrize(
    ("kind", "cache", "beams"),
    [
        ("gpt2", "dynamic", 1),
        ("llama", "static", 1),
        ("llama", "dynamic", 2),
        ("mistral", "dynamic", 1),
        ("mistral", "static", 1),
    ],
)
def test_generation_by_one_launch_a_layer_and_token(
    kind: str, cache: str, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = model(kind)
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
    run, attend = kernels._run, F.scaled_dot_product_attention

    def count(name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(kernels, "_run", count("kernel", run))
    monkeypatch.setattr(caches, "refusal_of_decoding", lambda *_: None)
    by_kernel = subject.generate(ids, **options)
    assert torch.equal(by_kernel.sequences, by_torch.sequences)
    for got, wanted in zip(by_kernel.scores, by_torch.scores, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    if cache == "static" and kind == "mistral":
        # its rows move when it is full, before the powers of past tokens do
        assert counts["kernel"] == 0
        return
    # one layer; the first of three tokens is that of the prompt
    assert counts["kernel"] == 2
    monkeypatch.setattr(caches, "reason_for_sdpa_alone", lambda *_: None)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", count("torch", attend))
    past = transformers.DynamicCache(config=subject.config)
    with torch.no_grad():
        subject(ids, past_key_values=past)
        counts["torch"] = 0
        subject(ids[:, :1], past_key_values=past)
    assert counts["torch"] == 0
