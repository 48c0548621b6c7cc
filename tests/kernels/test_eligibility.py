"""What the fused kernels refuse, with the reason; asked of a GPU that need not be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gfsa.functional import which_backend
from gfsa.kernels import eligibility, tuned
from gfsa.operators import AttentionCall, Coefficients, Visibility, attention, choice


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
    tuned._table.cache_clear()
    monkeypatch.setattr(eligibility, "capability", lambda device: (9, 0))
    monkeypatch.setattr(eligibility, "TRITON", (3, 6))
    # which otherwise asks the GPU
    monkeypatch.setattr(choice, "_generator_cannot_be_reset", lambda device: False)


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


CAPABILITY = eligibility.capability


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


KEYS = torch.ones(2, 1, 1, 300, dtype=torch.bool)
SPANS = torch.zeros(1, 2, 2048, dtype=torch.int32)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (call(2, 4, 100, 64, degree=3), "degree 1 and 2, this one has 3"),
        (call(2, 4, 100, 64, dtype=torch.float32), "bfloat16 and float16, not torch.float32"),
        (call(4, 100, 64), r"tokens \(B, H, N, D\), got 3"),
        (call(2, 4, 100, 64, value_dim=32), r"head dim \(64\), got 32"),
        (call(2, 4, 100, 60), "multiples of 8, got 60"),
        (call(2, 4, 100, 256), "up to 128"),
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
        choice.choose("fused", *asked)


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
        choice.choose("fused", *call(2, 4, 100, 64, visible=visible, degree=degree))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("visible", [PACKED, Visibility(causal=True, window=8)])
def test_windows_and_documents_where_they_are_measured(
    visible: Visibility, compiling: bool, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    for length, head_dim in ((300, 64), (8192, 80), (8192, 128), (40000, 128)):
        asked = call(1, 4, length, head_dim, visible=visible, degree=degree)
        assert choice.choose("auto", *asked).backend == "fused"
    short = call(2, 4, 100, 64, visible=visible, degree=degree)
    assert "rows of more than 256 tokens" in choice.choose("auto", *short).reason
    assert choice.choose("fused", *short).backend == "fused"
    dropped = call(1, 4, 8192, 64, visible=visible, dropout_p=0.1, degree=degree)
    assert "measured without dropout" in choice.choose("auto", *dropped).reason
    monkeypatch.setattr(eligibility, "capability", lambda device: (10, 0))
    assert "gfsa tune measures neither windows" in choice.choose("auto", *asked).reason


def test_turned_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = call(2, 4, 100, 64)
    assert choice.choose("auto", *asked).backend == "fused"
    monkeypatch.setattr(eligibility, "TURNED_OFF", True)
    assert "GFSA_FUSED=0" in choice.choose("auto", *asked).reason
    with pytest.raises(ValueError, match="GFSA_FUSED=0 in the environment"):
        choice.choose("fused", *asked)


def test_what_turns_them_off() -> None:
    assert eligibility.turned_off("0")
    assert not eligibility.turned_off("")
    assert not eligibility.turned_off("1")
    with pytest.raises(ValueError, match=r"must be 0 .* or 1, got 'off'"):
        eligibility.turned_off("off")


def test_older_gpus_and_other_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = call(2, 4, 100, 64)
    assert eligibility.refusal(*asked) is None
    monkeypatch.setattr(eligibility, "TRITON", (3, 2))
    assert "Triton (3, 6) or newer, found (3, 2)" in eligibility.refusal(*asked)
    monkeypatch.setattr(eligibility, "TRITON", ())
    assert "found none" in eligibility.refusal(*asked)
    monkeypatch.setattr(eligibility, "capability", lambda device: (7, 5))
    assert "8.0 (Ampere) or newer, this one has 7.5" in eligibility.refusal(*asked)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)], ids=str)
def test_other_gpus_by_name_and_not_by_themselves(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels run there; whether they are faster, gfsa tune has to measure."""
    monkeypatch.setattr(eligibility, "capability", lambda device: capability)
    for degree in (1, 2):
        asked = call(2, 4, 300, 64, degree=degree)
        assert choice.choose("fused", *asked).backend == "fused"
        chosen = choice.choose("auto", *asked)
        assert chosen.backend == "sdpa"
        assert "run gfsa tune" in chosen.reason
    assert "Hopper" in eligibility.refusal_by_short(call(2, 4, 100, 64)[0].q, None, 0.1)


def test_a_decoded_token_where_its_kernel_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    token, v, _ = call(2, 4, 1, 64)
    coeffs: Any = OnHopper(4, 3, dtype=torch.float32)

    def refusal(coeffs: Any = coeffs, v: Any = v) -> str | None:
        with torch.no_grad():
            return eligibility.refusal_of_decoding(token, v, coeffs)

    assert refusal() is None
    empty, _, _ = call(0, 4, 1, 64)
    with torch.no_grad():
        assert "no tokens" in (eligibility.refusal_of_decoding(empty, v, coeffs) or "")
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
        found = eligibility.refusal_of_decoding(token, v, numbers)
        assert "no gradient" in (found or "")
    with torch.no_grad():
        for rows, fits in ((131072, True), (2**30, True), (2**30 + 1, False)):
            kept = token._replace(k=OnHopper(2, 4, rows, 64))
            found = eligibility.refusal_of_decoding(kept, v, OnHopper(4, 3, dtype=torch.float32))
            assert (found is None) is fits, found
        dropped = token._replace(dropout_p=0.1)
        assert "no dropout" in (eligibility.refusal_of_decoding(dropped, v, coeffs) or "")
    monkeypatch.setattr(eligibility, "TRITON", (3, 7))
    assert "not measured" in (refusal() or "")
    monkeypatch.setattr(eligibility, "TRITON", (3, 6))
    with monkeypatch.context() as benchmark:
        benchmark.setattr(eligibility, "DECODES_BY_KERNEL", False)
        assert "turned off" in (refusal() or "")
    with monkeypatch.context() as exporter:
        exporter.setattr(torch.compiler, "_is_exporting_flag", True)
        assert "exported" in (refusal() or "")
    monkeypatch.setattr(eligibility, "capability", lambda device: (8, 6))
    assert "not measured" in (refusal() or "")


@pytest.mark.parametrize(
    ("capability", "taken"), [((8, 0), True), ((8, 6), False), ((8, 9), False), ((12, 0), False)]
)
def test_wide_heads_need_shared_memory(
    capability: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eligibility, "capability", lambda device: capability)
    refusal = eligibility.refusal(*call(2, 4, 300, 128))
    assert refusal is None if taken else "99 KiB" in refusal
    assert eligibility.refusal(*call(2, 4, 300, 128, degree=1)) is None
    packed = eligibility.refusal(*call(2, 4, 300, 128, degree=1, visible=PACKED))
    assert packed is None if taken else "windows and documents" in packed


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
    assert choice.choose("auto", *asked).backend == "fused"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (call(2, 4, 300, 64, attn_mask=torch.ones(300, 300).bool()), "beyond 256 tokens"),
        (call(2, 4, 200, 128, attn_mask=torch.ones(200, 200).bool()), "beyond 64"),
        (call(2, 4, 300, 128, dropout_p=0.1), "not measured for head dims beyond 64"),
    ],
)
def test_auto_leaves_the_rest_and_says_why(asked: Asked, reason: str) -> None:
    chosen = choice.choose("auto", *asked)
    assert chosen.backend == "sdpa"
    assert reason in chosen.reason


def test_auto_on_a_newer_gpu_waits_for_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "capability", lambda device: (10, 0))
    chosen = choice.choose("auto", *call(2, 4, 100, 64))
    assert chosen.backend == "sdpa"
    assert "Hopper" in chosen.reason
    assert choice.choose("fused", *call(2, 4, 100, 64)).backend == "fused"


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
        (ones(2, 4, 100, 100), "the same for every head"),
        (ones(2, 1, 100, 100).mT, "contiguous rows"),
        (ones(2, 1, 100, 1), "contiguous rows"),
        # offsets of keys are counted in 32 bits
        (far_keys(2**20), None),
        (far_keys(2**24), "masks of keys with strides of"),
        (torch.ones((), dtype=torch.bool), None),
    ],
)
def test_masks_of_the_short_kernels(
    mask: torch.Tensor, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eligibility, "_refusal_of_device_by_gluon", lambda q: None)
    found = eligibility.refusal_by_short(OnHopper(2, 4, 100, 64), mask, 0.1)
    assert found is None if reason is None else reason in found


def test_captured_dropout_goes_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sdpa cannot keep one mask, a slower fused kernel still beats the dense operator."""
    monkeypatch.setattr(choice, "_generator_cannot_be_reset", lambda device: True)
    chosen = choice.choose("auto", *call(2, 4, 300, 128, dropout_p=0.1))
    assert chosen.backend == "fused"
    assert "sdpa does not" in chosen.reason


def test_a_cpu_is_told_so() -> None:
    q = torch.randn(1, 1, 8, 16)
    assert "need an NVIDIA GPU" in which_backend(q, q, q, torch.ones(3)).reason


def test_other_tensors_than_plain_ones() -> None:
    asked = call(2, 4, 100, 64)
    asked[0].q.is_nested = True
    assert "plain tensors" in eligibility.refusal(*asked)


def test_the_choice_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, the choice is made once and leaves no break."""
    monkeypatch.setattr(eligibility, "_refusal_of_device", lambda q: None)
    # the question itself as the compiler sees it, a constant; only the GPU is made up
    monkeypatch.setattr(eligibility, "capability", CAPABILITY)
    monkeypatch.setattr(eligibility, "_capability", lambda device: (9, 0))

    def chosen(q: torch.Tensor, mask: torch.Tensor | None, degree: int = 2) -> torch.Tensor:
        picked = choice.choose("auto", AttentionCall(q, q, mask), q, degree)
        return q + 1 if picked.backend == "fused" else q - 1

    q = torch.zeros(2, 1, 300, 16, dtype=torch.bfloat16)
    compiled = torch.compile(chosen, fullgraph=True, backend="eager")
    assert (compiled(q, KEYS) == 1).all()
    assert (compiled(q, torch.ones(300, 300, dtype=torch.bool)) == -1).all()
    # the compiler combines two tensors in one kernel itself, unless all is one kernel already
    assert (compiled(q, KEYS, 1) == -1).all()
    assert (compiled(q[:, :, :100], KEYS[..., :100], 1) == 1).all()

    def causal(q: torch.Tensor) -> torch.Tensor:
        picked = choice.choose("auto", AttentionCall(q, q, is_causal=True), q, 1)
        return q + 1 if picked.backend == "fused" else q - 1

    wide = torch.zeros(1, 1, 1024, 128, dtype=torch.bfloat16)
    # these kernels need a GPU, and there is none: the compiler's own
    assert (torch.compile(causal, fullgraph=True, backend="eager")(wide) == -1).all()
    monkeypatch.setattr(eligibility, "_refusal_of_device_by_gluon", lambda q: None)
    torch._dynamo.reset()
    assert (torch.compile(causal, fullgraph=True, backend="eager")(wide) == 1).all()


@pytest.mark.parametrize(
    ("is_causal", "dropout_p", "expected"),
    [(True, 0.0, "fused"), (False, 0.0, "sdpa"), (True, 0.1, "sdpa")],
)
def test_padded_rows_of_degree_one_compiled(
    is_causal: bool, dropout_p: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's attention of padded causal rows would write a mask of all queries and keys."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    options = {"is_causal": is_causal, "dropout_p": dropout_p, "attn_mask": KEYS}
    assert choice.choose("auto", *call(2, 4, 300, 128, degree=1, **options)).backend == expected


@pytest.mark.parametrize(
    ("length", "head_dim", "scale", "expected"),
    [
        (300, 64, None, "fused"),
        (1024, 64, 0.1, "fused"),
        (1025, 64, None, "fused"),
        (8192, 64, None, "fused"),
        (8193, 64, None, "sdpa"),
        (1024, 56, None, "sdpa"),
        (1024, 128, None, "fused"),
        (511, 128, None, "sdpa"),
        (1024, 64, -0.1, "sdpa"),
    ],
)
def test_degree_one_compiled_is_one_pass_where_that_was_measured(
    length: int, head_dim: int, scale: float | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = call(2, 4, length, head_dim, degree=1, scale=scale, is_causal=True)
    # eager, kernels of the library are around torch's attention too
    assert choice.choose("auto", *asked).backend == "fused"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choice.choose("auto", *asked).backend == expected


@pytest.mark.parametrize(
    ("head_dim", "mask", "device", "reason"),
    [
        (64, None, (9, 0), None),
        (128, None, (9, 0), None),
        (96, None, (9, 0), "head dims of (64, 128), got 96"),
        (64, KEYS, (9, 0), "no mask but causality"),
        (128, SPANS, (9, 0), None),
        (64, SPANS, (8, 0), "Hopper"),
        (64, None, (8, 0), "Hopper"),
    ],
)
def test_the_hopper_gradient_of_degree_one(
    head_dim: int,
    mask: torch.Tensor | None,
    device: tuple[int, int],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows beyond 1,024 tokens are served in one pass where the Hopper kernels take them alone."""
    monkeypatch.setattr(eligibility, "capability", lambda _: device)
    monkeypatch.setattr(eligibility, "TRITON", eligibility.SHORT_TRITON[0])
    q = OnHopper(2, 4, 2048, head_dim)
    found = eligibility.refusal_by_hopper_once(q, mask)
    assert found is None if reason is None else reason in found
    assert eligibility.one_pass_is_fastest(q, mask, None, 0.0, True) is (reason is None)


@pytest.mark.parametrize(
    ("length", "head_dim", "options", "serves"),
    [
        (2048, 128, {"is_causal": True}, True),
        (512, 128, {"is_causal": True}, True),
        (511, 128, {"is_causal": True}, False),
        (8192, 128, {"is_causal": True}, True),
        (8193, 128, {"is_causal": True}, False),
        (2048, 128, {}, False),
        (2048, 128, {"is_causal": True, "dropout_p": 0.1}, False),
        (2048, 128, {"is_causal": True, "scale": -0.1}, False),
        (2048, 96, {"is_causal": True}, False),
        (2048, 64, {}, True),
    ],
)
def test_wide_heads_of_degree_one(
    length: int, head_dim: int, options: dict[str, Any], serves: bool
) -> None:
    """In one causal sweep; what that does not serve is around torch's attention."""
    q = OnHopper(2, 4, length, head_dim)
    asked = {"scale": None, "dropout_p": 0.0, "is_causal": False, **options}
    assert eligibility.one_pass_is_fastest(q, None, **asked) is serves
    assert choice.choose("auto", *call(2, 4, length, head_dim, degree=1)).backend == "fused"


@pytest.mark.parametrize(
    ("length", "head_dim", "options", "serves"),
    [
        (2048, 64, {}, True),
        # of any length
        (50, 64, {}, True),
        (300, 128, {}, True),
        (40000, 128, {}, True),
        # the kernels of degree 2 serve these
        (2048, 80, {}, False),
        (2048, 32, {}, False),
        (2048, 64, {"dropout_p": 0.1}, False),
        (2048, 64, {"scale": -0.1}, False),
    ],
)
def test_spans_in_one_pass(
    length: int, head_dim: int, options: dict[str, Any], serves: bool
) -> None:
    spans = torch.zeros(1, 2, length, dtype=torch.int32)
    asked = {"scale": None, "dropout_p": 0.0, **options}
    q = OnHopper(2, 4, length, head_dim)
    assert eligibility.one_pass_is_fastest(q, spans, **asked, is_causal=True) is serves


def test_cudnns_gradient_for_long_rows_of_wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is absent or turned off, or every run has to give the same bits."""

    def by_cudnn(q: Any, mask: Any = None) -> bool:
        return eligibility.leaves_gradient_to_cudnn(q, mask)

    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert not by_cudnn(OnHopper(2, 4, 8192, 128))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    with torch.backends.cudnn.flags(enabled=False):
        assert not by_cudnn(OnHopper(2, 4, 8192, 128))
    assert by_cudnn(OnHopper(2, 4, 8192, 128))
    assert not by_cudnn(OnHopper(2, 4, 8192, 128), SPANS)
    assert not by_cudnn(OnHopper(2, 4, 4096, 128))
    assert not by_cudnn(OnHopper(2, 4, 8192, 64))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not by_cudnn(OnHopper(2, 4, 8192, 128))
    torch.use_deterministic_algorithms(True)
    try:
        assert not by_cudnn(OnHopper(2, 4, 8192, 128))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_traced_graph_has_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.jit.trace sees torch's operators alone; also for a call that was chosen before."""
    monkeypatch.setattr(attention, "PLAIN", (OnHopper,))
    asked = call(2, 4, 300, 64)
    q, v = asked[0].q, asked[1]
    coeffs = torch.ones(4, 3)
    assert choice.choose("auto", *asked).backend == "fused"
    assert attention.host_time_counts(q, q, v)
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    assert "torch.jit.trace" in choice.choose("auto", *asked).reason
    assert "torch.jit.trace" in eligibility.refusal_of_decoding(asked[0], v, coeffs)
    assert not attention.host_time_counts(q, q, v)
    with pytest.raises(ValueError, match=r"torch\.jit\.trace does not record"):
        choice.choose("fused", *asked)
