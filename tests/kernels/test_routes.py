"""Which kernels serve a call, and why not others; asked of a GPU that need not be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gfsa.functional import which_backend
from gfsa.kernels import routes, tuned
from gfsa.operators import AttentionCall, Coefficients, Visibility, attention


class OnHopper:
    """Tokens that say they lie on a Hopper GPU."""

    is_cuda, is_nested, requires_grad = True, False, False
    device = torch.device("cuda", 0)

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # nothing was measured by gfsa tune
    monkeypatch.setenv("GFSA_TUNED", str(tmp_path / "none.json"))
    tuned._rows.cache_clear()
    monkeypatch.setattr(routes, "capability", lambda device: (9, 0))
    monkeypatch.setattr(routes, "TRITON", (3, 6))
    # which otherwise asks the GPU
    monkeypatch.setattr(routes, "_generator_cannot_be_reset", lambda device: False)


# what is asked of a choice: the call, its values, and the degree of the filter
Asked = tuple[AttentionCall, torch.Tensor, int]


def call(
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    value_dim: int = 0,
    key_heads: int = 0,
    degree: int = 2,
    **options: object,
) -> Asked:
    q = OnHopper(*shape, dtype=dtype)
    k = OnHopper(shape[0], key_heads or shape[1], *shape[2:], dtype=dtype)
    v = OnHopper(*shape[:-1], value_dim or shape[-1], dtype=dtype)
    return AttentionCall(q, k, **options), v, degree  # type: ignore[arg-type,return-value]


def situation(*shape: int, **options: Any) -> routes.Situation:
    return routes.situation_of(*call(*shape, **options))


def chosen(backend: Any, *asked: Any) -> routes.Decision:
    return routes.decide(routes.situation_of(*asked), backend)


def refusal(*asked: Any) -> str | None:
    return routes.refusal_by_fused(routes.situation_of(*asked))


CAPABILITY = routes.capability


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


KEYS = torch.ones(2, 1, 1, 300, dtype=torch.bool)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (call(2, 4, 100, 64, degree=3), "degree 1 and 2, this one has 3"),
        (call(2, 4, 100, 64, dtype=torch.float32), "bfloat16 and float16, not torch.float32"),
        (call(4, 100, 64), r"tokens \(B, H, N, D\), got 3"),
        (call(2, 4, 100, 64, value_dim=32), r"head dim \(64\), got 32"),
        (call(2, 4, 100, 60), "multiples of 8, got 60"),
        (call(2, 4, 100, 264), "up to 256"),
        (call(0, 4, 100, 64), "no tokens"),
        (call(70000, 1, 100, 64), "65535 heads"),
        (call(2, 4, 300, 64, attn_mask=torch.zeros(300, 300)), "bool masks, not additive"),
        (call(2, 4, 100, 64, dropout_p=1.0), "dropout_p below 1, got 1.0"),
        (call(1, 1, 70000, 64, dropout_p=0.1), "65536 tokens at most with dropout"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused(asked: Asked, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        chosen("fused", *asked)


PACKED = Visibility.packed(torch.tensor([0, 10, 100]), 100)


@pytest.mark.parametrize(
    ("visible", "degree", "reason"),
    [
        (Visibility(window=8), 1, "queries see later tokens"),
        (Visibility(window=8), 2, "queries see later tokens"),
        (Visibility(causal=True, documents=PACKED.documents), 2, "in_order is False"),
    ],
)
def test_refused_descriptions(visible: Visibility, degree: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        chosen("fused", *call(2, 4, 100, 64, visible=visible, degree=degree))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("visible", [PACKED, Visibility(causal=True, window=8)])
def test_windows_and_documents_where_they_are_measured(
    visible: Visibility, compiling: bool, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    for length, head_dim in ((300, 64), (8192, 80), (8192, 128), (40000, 128)):
        asked = call(1, 4, length, head_dim, visible=visible, degree=degree)
        assert chosen("auto", *asked).backend == "fused"
    short = call(2, 4, 100, 64, visible=visible, degree=degree)
    assert "rows of more than 256 tokens" in chosen("auto", *short).reason
    assert chosen("fused", *short).backend == "fused"
    dropped = call(1, 4, 8192, 64, visible=visible, dropout_p=0.1, degree=degree)
    assert "measured without dropout" in chosen("auto", *dropped).reason
    monkeypatch.setattr(routes, "capability", lambda device: (10, 0))
    assert "gfsa tune measures neither windows" in chosen("auto", *asked).reason


def test_turned_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = call(2, 4, 100, 64)
    assert chosen("auto", *asked).backend == "fused"
    monkeypatch.setattr(routes, "TURNED_OFF", True)
    assert "GFSA_FUSED=0" in chosen("auto", *asked).reason
    with pytest.raises(ValueError, match="GFSA_FUSED=0 in the environment"):
        chosen("fused", *asked)


def test_what_turns_them_off() -> None:
    assert routes.turned_off("0")
    assert not routes.turned_off("")
    assert not routes.turned_off("1")
    with pytest.raises(ValueError, match=r"must be 0 .* or 1, got 'off'"):
        routes.turned_off("off")


def test_older_gpus_and_other_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = call(2, 4, 100, 64)
    assert refusal(*asked) is None
    monkeypatch.setattr(routes, "TRITON", (3, 2))
    assert "Triton (3, 6) or newer, found (3, 2)" in refusal(*asked)
    monkeypatch.setattr(routes, "TRITON", ())
    assert "found none" in refusal(*asked)
    monkeypatch.setattr(routes, "capability", lambda device: (7, 5))
    assert "8.0 (Ampere) or newer, this one has 7.5" in refusal(*asked)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)], ids=str)
def test_other_gpus_by_name_and_not_by_themselves(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels run there; whether they are faster, gfsa tune has to measure."""
    monkeypatch.setattr(routes, "capability", lambda device: capability)
    for degree in (1, 2):
        asked = call(2, 4, 300, 64, degree=degree)
        own = "two_pass" if degree == 2 else "around_torch"
        assert chosen("fused", *asked).route == own
        found = chosen("auto", *asked)
        assert found.backend == "sdpa"
        assert "run gfsa tune" in found.reason
    rejected = dict(chosen("fused", *call(2, 4, 100, 64)).rejected)
    assert "Hopper" in rejected["short"]


def test_a_decoded_token_where_its_kernel_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    token, v, _ = call(2, 4, 1, 64)
    coeffs: Any = OnHopper(4, 3, dtype=torch.float32)

    def refusal(coeffs: Any = coeffs, v: Any = v) -> str | None:
        with torch.no_grad():
            return routes.refusal_of_decoding(token, v, coeffs)

    assert refusal() is None
    empty, _, _ = call(0, 4, 1, 64)
    with torch.no_grad():
        assert "no tokens" in (routes.refusal_of_decoding(empty, v, coeffs) or "")
    assert refusal(OnHopper(4, 2, dtype=torch.float32)) is None
    for degree in (0, 3):
        found = refusal(OnHopper(4, degree + 1, dtype=torch.float32)) or ""
        assert f"degree 1 and 2, this one has {degree}" in found
    assert "a filter and a mask on cuda:0" in (refusal(torch.zeros(4, 3)) or "")
    assert "one dtype" in (refusal(v=OnHopper(2, 4, 1, 64, dtype=torch.float16)) or "")
    learned = Coefficients(torch.zeros(4, 3, requires_grad=True), coeffs, torch.eye(3))
    assert refusal(learned) is None
    coeffs.requires_grad = True
    for numbers in (coeffs, learned):
        found = routes.refusal_of_decoding(token, v, numbers)
        assert "no gradient" in (found or "")
    with torch.no_grad():
        for rows, fits in ((131072, True), (2**30, True), (2**30 + 1, False)):
            kept = token._replace(k=OnHopper(2, 4, rows, 64))
            found = routes.refusal_of_decoding(kept, v, OnHopper(4, 3, dtype=torch.float32))
            assert (found is None) is fits, found
        dropped = token._replace(dropout_p=0.1)
        assert "no dropout" in (routes.refusal_of_decoding(dropped, v, coeffs) or "")
    monkeypatch.setattr(routes, "TRITON", (3, 7))
    assert "not measured" in (refusal() or "")
    monkeypatch.setattr(routes, "TRITON", (3, 6))
    with monkeypatch.context() as benchmark:
        benchmark.setattr(routes, "DECODES_BY_KERNEL", False)
        assert "turned off" in (refusal() or "")
    with monkeypatch.context() as exporter:
        exporter.setattr(torch.compiler, "_is_exporting_flag", True)
        assert "exported" in (refusal() or "")
    monkeypatch.setattr(routes, "capability", lambda device: (8, 6))
    assert "not measured" in (refusal() or "")


@pytest.mark.parametrize(
    ("capability", "widest"),
    [((8, 0), 128), ((8, 6), 64), ((8, 9), 64), ((9, 0), 256), ((10, 0), 128), ((12, 0), 64)],
)
def test_wide_heads_need_shared_memory(
    capability: tuple[int, int], widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "capability", lambda device: capability)
    for head_dim in (64, 128, 256):
        taken = head_dim <= widest
        found = refusal(*call(2, 4, 300, head_dim))
        assert found is None if taken else "shared memory" in found
        assert refusal(*call(2, 4, 300, head_dim, degree=1)) is None
        # windows and documents, and padded causal rows, of degree 1 by the kernels of degree 2
        fits = taken and head_dim <= 128
        packed = chosen("auto", *call(2, 4, 300, head_dim, degree=1, visible=PACKED))
        assert packed.route in (
            ("two_pass", "one_sweep", "sdpa") if fits else ("sdpa", "around_torch")
        )
        found = chosen("fused", *call(2, 4, 300, head_dim, degree=1, **CAUSAL, **padded(2, 300)))
        assert found.route == ("two_pass" if fits else "around_torch")
    # beyond what was measured it runs by name alone, also where torch's attention cannot serve
    assert chosen("auto", *call(2, 4, 300, 256)).route == "sdpa"
    monkeypatch.setattr(routes, "_generator_cannot_be_reset", lambda device: True)
    assert chosen("auto", *call(2, 4, 300, 256, dropout_p=0.1)).route == "dense"


@pytest.mark.parametrize(
    "asked",
    [
        call(32, 12, 128, 64),
        call(2, 12, 300, 64, attn_mask=KEYS),
        call(2, 12, 300, 64, attn_mask=KEYS.expand(2, 12, 300, 300)),
        call(8, 12, 1024, 64, is_causal=True, dropout_p=0.1),
        call(2, 16, 8192, 128),
        call(2, 4, 300, 128, attn_mask=KEYS),
        call(2, 4, 300, 80, attn_mask=KEYS, is_causal=True, key_heads=2),
        call(32, 12, 128, 64, degree=1),
        call(8, 12, 1024, 64, is_causal=True, degree=1),
        call(2, 16, 8192, 128, degree=1),
        call(8, 32, 2048, 128, is_causal=True, key_heads=8, degree=1),
        call(8, 32, 2048, 64, is_causal=True, key_heads=8, degree=1),
        call(2, 4, 300, 128, dropout_p=0.1, degree=1),
        call(2, 4, 300, 64, attn_mask=torch.ones(300, 300).bool(), degree=1),
    ],
)
def test_auto_takes_what_was_measured(asked: Asked) -> None:
    found = chosen("auto", *asked)
    assert found.route in routes.OPERATION
    # torch's attention is not said to be ours
    assert found.backend == ("sdpa" if found.route == "around_torch" else "fused")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (call(2, 4, 300, 64, attn_mask=torch.ones(300, 300).bool()), "beyond 256 tokens"),
        (call(2, 4, 200, 128, attn_mask=torch.ones(200, 200).bool()), "beyond 64"),
        (call(2, 4, 300, 128, dropout_p=0.1), "not measured for head dims beyond 64"),
    ],
)
def test_auto_leaves_the_rest_and_says_why(asked: Asked, reason: str) -> None:
    found = chosen("auto", *asked)
    assert found.backend == "sdpa"
    assert reason in found.reason


def far_keys(stride: int) -> torch.Tensor:
    """A mask of 100 keys; it has no memory, of which the choice of kernels reads none."""
    memory = torch.empty(100 * stride, dtype=torch.bool, device="meta")
    return memory.as_strided((2, 1, 1, 100), (0, 0, 0, stride))


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (ones(2, 1, 1, 100), None),
        (ones(2, 1, 100, 100), None),
        (ones(100, 100), None),
        (ones(2, 1, 1, 100).expand(2, 4, 100, 100), None),
        (ones(2, 1, 100, 100).expand(2, 4, 100, 100), None),
        (ones(2, 4, 100, 100), "this one is of other pairs"),
        # which is copied
        (ones(2, 1, 100, 100).mT, None),
        (ones(2, 1, 100, 1), "this one is of other pairs"),
        # offsets of keys are counted in 32 bits
        (far_keys(2**20), None),
        (far_keys(2**24), "this one is of far keys"),
        (torch.ones((), dtype=torch.bool), None),
    ],
)
def test_masks_of_the_short_kernels(mask: torch.Tensor, reason: str | None) -> None:
    found = chosen("fused", *call(2, 4, 100, 64, attn_mask=mask))
    rejected = dict(found.rejected)
    assert found.route == "short" if reason is None else reason in rejected["short"]


def test_captured_dropout_goes_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sdpa cannot keep one mask, a slower fused kernel still beats the dense operator."""
    monkeypatch.setattr(routes, "_generator_cannot_be_reset", lambda device: True)
    found = chosen("auto", *call(2, 4, 300, 128, dropout_p=0.1))
    assert found.backend == "fused"
    assert "sdpa does not" in found.reason


def test_a_cpu_is_told_so() -> None:
    q = torch.randn(1, 1, 8, 16)
    assert "need an NVIDIA GPU" in which_backend(q, q, q, torch.ones(3)).reason


def test_other_tensors_than_plain_ones() -> None:
    asked = call(2, 4, 100, 64)
    asked[0].q.is_nested = True
    assert "plain tensors" in refusal(*asked)


def test_the_choice_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, the choice is made once and leaves no break."""
    gpu = routes.Hardware((9, 0), (3, 6), None)
    monkeypatch.setattr(routes, "hardware_of", lambda q: gpu)

    def picked(q: torch.Tensor, mask: torch.Tensor | None, degree: int = 2) -> torch.Tensor:
        found = chosen("auto", AttentionCall(q, q, mask), q, degree)
        return q + 1 if found.backend == "fused" else q - 1

    q = torch.zeros(2, 1, 300, 16, dtype=torch.bfloat16)
    compiled = torch.compile(picked, fullgraph=True, backend="eager")
    assert (compiled(q, KEYS) == 1).all()
    assert (compiled(q, torch.ones(300, 300, dtype=torch.bool)) == -1).all()
    # the compiler combines two tensors in one kernel itself, unless all is one kernel already
    assert (compiled(q, KEYS, 1) == -1).all()
    assert (compiled(q[:, :, :100], KEYS[..., :100], 1) == 1).all()

    def causal(q: torch.Tensor) -> torch.Tensor:
        found = chosen("auto", AttentionCall(q, q, is_causal=True), q, 1)
        return q + 1 if found.backend == "fused" else q - 1

    wide = torch.zeros(1, 1, 1024, 128, dtype=torch.bfloat16)
    assert (torch.compile(causal, fullgraph=True, backend="eager")(wide) == 1).all()


def test_the_gpu_is_a_constant_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "capability", CAPABILITY)
    monkeypatch.setattr(routes, "_capability", lambda device: (9, 0))

    def is_hopper(q: torch.Tensor) -> torch.Tensor:
        major, minor = routes.capability(q.device)
        return q + 1 if (major, minor) == routes.HOPPER else q - 1

    assert (torch.compile(is_hopper, fullgraph=True, backend="eager")(torch.zeros(2)) == 1).all()


def test_a_graph_is_not_compiled_again_at_each_kernels_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The operator that the graph holds chooses among its kernels when it runs."""
    gpu = routes.Hardware((9, 0), (3, 6), None)
    monkeypatch.setattr(routes, "hardware_of", lambda q: gpu)
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def work(q: torch.Tensor) -> torch.Tensor:
        found = chosen("auto", AttentionCall(q, q, is_causal=True), q, 2)
        assert found.route == "filter"
        return q + 1

    torch._dynamo.reset()
    compiled = torch.compile(work, fullgraph=True, backend=count, dynamic=True)
    for length in (100, 300, 1024, 1026):
        compiled(torch.zeros(1, 96, length, 64, dtype=torch.bfloat16))
    assert len(graphs) == 1


def test_causality_may_be_the_compilers_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = routes.Hardware((9, 0), (3, 6), None)
    monkeypatch.setattr(routes, "hardware_of", lambda q: gpu)

    def work(q: torch.Tensor) -> torch.Tensor:
        found = routes.situation_of_kernels(q, None, 1.0, q.shape[2] > 700, 0.0, False, 1)
        return q + len(routes.operation_of(found))

    torch._dynamo.reset()
    compiled = torch.compile(work, fullgraph=True, backend="eager", dynamic=True)
    for length in (600, 800):
        q = torch.zeros(1, 4, length, 128, dtype=torch.bfloat16)
        assert torch.equal(compiled(q), work(q))


CAUSAL: dict[str, Any] = {"is_causal": True}
DROPOUT: dict[str, Any] = {"dropout_p": 0.1}
NEGATIVE: dict[str, Any] = {"scale": -0.1}
DOCUMENTS: dict[str, Any] = {"visible": PACKED}


def padded(batch: int, length: int) -> dict[str, Any]:
    return {"attn_mask": ones(batch, 1, 1, length)}


@pytest.mark.parametrize(
    ("shape", "options", "route", "gradient"),
    [
        ((1, 1, 100, 64), CAUSAL, "short", "short"),
        ((1, 1, 100, 64), CAUSAL | padded(1, 100), "short", "short"),
        ((1, 1, 100, 64), CAUSAL | NEGATIVE, "two_pass", "hopper"),
        ((1, 1, 100, 128), CAUSAL, "two_pass", "hopper"),
        ((1, 1, 300, 64), CAUSAL | padded(1, 300), "two_pass", "hopper"),
        ((1, 1, 301, 64), CAUSAL, "two_pass", "two_pass"),
        ((1, 1, 2048, 128), {}, "two_pass", "hopper"),
        ((1, 1, 2050, 128), {}, "two_pass", "two_pass"),
        ((1, 1, 300, 64), DROPOUT, "two_pass", "two_pass"),
        ((1, 1, 300, 64), {"attn_mask": ones(300, 300)}, "two_pass", "two_pass"),
        # one causal sweep
        ((8, 12, 1024, 64), CAUSAL, "sweep", "hopper"),
        ((8, 12, 1026, 64), CAUSAL, "sweep", "two_pass"),
        ((4, 16, 4096, 128), CAUSAL, "sweep", "hopper"),
        ((8, 12, 1024, 64), {}, "two_pass", "hopper"),
        ((8, 12, 1024, 64), CAUSAL | NEGATIVE, "two_pass", "hopper"),
        ((8, 12, 1024, 64), CAUSAL | padded(8, 1024), "two_pass", "hopper"),
        ((8, 12, 1024, 80), CAUSAL, "two_pass", "hopper"),
        ((8, 12, 1000, 64), CAUSAL, "two_pass", "hopper"),
        ((1, 95, 1024, 64), CAUSAL, "two_pass", "hopper"),
        ((1, 3, 32768, 128), CAUSAL, "sweep", "hopper"),
        ((1, 3, 32769, 128), CAUSAL, "two_pass", "two_pass"),
        ((1, 65535, 1024, 64), CAUSAL, "two_pass", "hopper"),
        ((4, 16, 8192, 64), DOCUMENTS, "sweep", "hopper"),
        ((8, 12, 1024, 80), DOCUMENTS, "two_pass", "hopper"),
        ((1, 1, 100, 64), DOCUMENTS, "two_pass", "hopper"),
        ((1, 1, 2050, 128), DOCUMENTS, "two_pass", "two_pass"),
    ],
    ids=str,
)
def test_degree_two(
    shape: tuple[int, ...], options: dict[str, Any], route: str, gradient: str
) -> None:
    found = chosen("fused", *call(*shape, **options))
    assert (found.backend, found.route, found.gradient) == ("fused", route, gradient)
    with torch.no_grad():
        found = chosen("fused", *call(*shape, **options))
    assert (found.route, found.gradient) == (route, "none")


@pytest.mark.parametrize(
    ("length", "head_dim", "options", "route", "gradient"),
    [
        (127, 64, {}, "short", "short"),
        (128, 64, {}, "one_sweep", "hopper"),
        (511, 64, CAUSAL, "one_sweep", "hopper"),
        (512, 64, CAUSAL, "one_sweep", "hopper"),
        (2048, 64, {}, "one_sweep", "hopper"),
        (8192, 64, CAUSAL, "one_sweep", "hopper"),
        (8193, 64, CAUSAL, "around_torch", "around_torch"),
        (1024, 56, CAUSAL, "around_torch", "around_torch"),
        (511, 128, CAUSAL, "around_torch", "around_torch"),
        (2048, 128, CAUSAL, "one_sweep", "hopper"),
        (4096, 128, CAUSAL, "one_sweep", "hopper"),
        (4097, 128, CAUSAL, "around_torch", "around_torch"),
        (2048, 128, {}, "around_torch", "around_torch"),
        (2048, 96, CAUSAL, "one_sweep", "hopper"),
        (2048, 80, {}, "one_sweep", "hopper"),
        (2048, 72, {}, "around_torch", "around_torch"),
        (2048, 96, {}, "around_torch", "around_torch"),
        (2048, 128, CAUSAL | DROPOUT, "around_torch", "around_torch"),
        (2048, 128, CAUSAL | NEGATIVE, "around_torch", "around_torch"),
        # documents: one pass of any length, otherwise the kernels of degree 2
        (50, 64, DOCUMENTS, "one_sweep", "hopper"),
        (40000, 128, DOCUMENTS, "one_sweep", "hopper"),
        (2048, 72, DOCUMENTS, "two_pass", "hopper"),
        (2048, 64, DOCUMENTS | DROPOUT, "two_pass", "two_pass"),
        (2048, 64, DOCUMENTS | NEGATIVE, "two_pass", "hopper"),
        # torch would write a mask of all queries and keys for padded causal rows
        (300, 128, CAUSAL | padded(2, 300), "two_pass", "hopper"),
        (300, 128, padded(2, 300), "around_torch", "around_torch"),
        (300, 64, CAUSAL | DROPOUT | padded(2, 300), "around_torch", "around_torch"),
    ],
    ids=str,
)
def test_degree_one(
    length: int,
    head_dim: int,
    options: dict[str, Any],
    route: str,
    gradient: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = chosen("fused", *call(2, 4, length, head_dim, degree=1, **options))
    assert (found.route, found.gradient) == (route, gradient)
    # what the operator of a compiled graph finds when it runs
    asked = situation(2, 4, length, head_dim, degree=1, **options)
    operation = routes.operation_of(asked)
    assert operation == routes.OPERATION[route]
    # eager, a kernel of the library is around torch's attention at least; the compiler does that by
    # itself. Short documents and dropout in documents are not measured
    measured = "visible" not in options or (length > 256 and "dropout_p" not in options)
    asked = call(2, 4, length, head_dim, degree=1, **options)
    assert (chosen("auto", *asked).route == route) is measured
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    fused = operation != "around" and measured
    assert chosen("auto", *asked).backend == ("fused" if fused else "sdpa")


@pytest.mark.parametrize(
    ("asked", "route"),
    [
        (call(32, 12, 1024, 64, degree=1, is_causal=True), "one_sweep"),
        (call(32, 12, 4096, 128, degree=1, is_causal=True, key_heads=4), "one_sweep"),
        (call(32, 12, 128, 64, degree=1), "one_sweep"),
        (call(2, 4, 300, 64, degree=1, visible=Visibility(causal=True, window=8)), "one_sweep"),
        (call(2, 4, 300, 96, degree=1, is_causal=True), "around_torch"),
        (call(2, 4, 300, 256, degree=1, is_causal=True), "around_torch"),
        (call(2, 4, 60, 32, degree=1, dropout_p=0.1), "around_torch"),
        (call(2, 4, 300, 72, degree=1, visible=Visibility(causal=True, window=8)), "around_torch"),
        (call(2, 4, 300, 64, degree=2), "sdpa"),
    ],
)
def test_the_exclusive_term(asked: Asked, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen("auto", *asked, True)
    assert found.route == route, str(found)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    operation = routes.OPERATION.get(route, route)
    # the compiler adds it to torch's attention by itself
    assert chosen("auto", *asked, True).route == ("sdpa" if operation == "around" else operation)


@pytest.mark.parametrize(("length", "head_dim"), [(64, 64), (2048, 96), (2048, 128)])
def test_degree_one_without_a_gradient(length: int, head_dim: int) -> None:
    """Where one sweep is faster forward alone."""
    asked = call(2, 4, length, head_dim, degree=1)
    assert chosen("auto", *asked).route in ("short", "around_torch")
    with torch.no_grad():
        assert chosen("auto", *asked).route == "one_sweep"


def test_the_page_has_the_table() -> None:
    """``python -m gfsa.kernels.routes`` prints it."""
    page = Path(__file__).parents[2] / "docs" / "kernels.md"
    assert routes.as_markdown() in page.read_text(encoding="utf-8")


def test_a_traced_graph_has_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.jit.trace sees torch's operators alone; also for a call that was chosen before."""
    monkeypatch.setattr(attention, "PLAIN", (OnHopper,))
    asked = call(2, 4, 300, 64)
    q, v = asked[0].q, asked[1]
    coeffs = torch.ones(4, 3)
    assert chosen("auto", *asked).backend == "fused"
    assert attention.host_time_counts(q, q, v)
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    assert "torch.jit.trace" in chosen("auto", *asked).reason
    assert "torch.jit.trace" in routes.refusal_of_decoding(asked[0], v, coeffs)
    assert not attention.host_time_counts(q, q, v)
    with pytest.raises(ValueError, match=r"torch\.jit\.trace does not record"):
        chosen("fused", *asked)
