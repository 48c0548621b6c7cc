"""What the fused kernels refuse, with the reason; asked of a GPU that need not be there."""

from __future__ import annotations

import pytest
import torch

from gfsa.functional import which_backend
from gfsa.operators import choice as select
from gfsa.operators.fused import eligibility as support


class OnHopper:
    """Tokens that say they lie on a Hopper GPU."""

    is_cuda, is_nested = True, False
    device = torch.device("cuda", 0)

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "capability", lambda device: (9, 0))
    monkeypatch.setattr(support, "TRITON", (3, 6))
    # which otherwise asks the GPU
    monkeypatch.setattr(select, "_generator_is_out_of_reach", lambda device: False)


def call(
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    value_dim: int = 0,
    key_heads: int = 0,
    **options: object,
) -> select.Call:
    q = OnHopper(*shape, dtype=dtype)
    k = OnHopper(shape[0], key_heads or shape[1], *shape[2:], dtype=dtype)
    v = OnHopper(*shape[:-1], value_dim or shape[-1], dtype=dtype)
    given = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "degree": 2, **options}
    return select.Call(q, k, v, **given)  # type: ignore[arg-type]


CAPABILITY = support.capability


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


KEYS = torch.ones(2, 1, 1, 300, dtype=torch.bool)


@pytest.mark.parametrize(
    ("made", "reason"),
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
        (call(2, 4, 100, 64, dropout_p=1.0), "less than everything"),
        (call(1, 1, 70000, 64, dropout_p=0.1), "65536 tokens at most with dropout"),
        (call(2, 4, 300, 64, degree=1, key_heads=2), "as many heads of keys"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused(made: select.Call, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        select.choose("fused", made)


def test_older_gpus_and_other_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    made = call(2, 4, 100, 64)
    assert support.why_not(made) is None
    monkeypatch.setattr(support, "TRITON", (3, 2))
    assert "Triton (3, 6) or newer, found (3, 2)" in support.why_not(made)
    monkeypatch.setattr(support, "TRITON", ())
    assert "found none" in support.why_not(made)
    monkeypatch.setattr(support, "capability", lambda device: (8, 0))
    assert "this one has 8.0" in support.why_not(made)


@pytest.mark.parametrize(
    "made",
    [
        call(32, 12, 128, 64),
        call(2, 12, 300, 64, attn_mask=KEYS),
        call(2, 12, 300, 64, attn_mask=KEYS.expand(2, 12, 300, 300)),
        call(8, 12, 1024, 64, is_causal=True, dropout_p=0.1),
        call(2, 16, 8192, 128),
        call(32, 12, 128, 64, degree=1),
        call(8, 12, 1024, 64, is_causal=True, degree=1),
        call(2, 16, 8192, 128, degree=1),
        call(2, 4, 300, 128, dropout_p=0.1, degree=1),
        call(2, 4, 300, 64, attn_mask=torch.ones(300, 300).bool(), degree=1),
    ],
)
def test_auto_takes_what_was_measured(made: select.Call) -> None:
    assert select.choose("auto", made).backend == "fused"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (call(2, 4, 300, 64, attn_mask=torch.ones(300, 300).bool()), "beyond 256 tokens"),
        (call(2, 4, 300, 128, attn_mask=KEYS), "not measured for head dims beyond 64"),
        (call(2, 4, 300, 128, dropout_p=0.1), "not measured for head dims beyond 64"),
    ],
)
def test_auto_leaves_the_rest_and_says_why(made: select.Call, reason: str) -> None:
    choice = select.choose("auto", made)
    assert choice.backend == "sdpa"
    assert reason in choice.reason


def test_auto_on_a_newer_gpu_waits_for_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "capability", lambda device: (10, 0))
    choice = select.choose("auto", call(2, 4, 100, 64))
    assert choice.backend == "sdpa"
    assert "Hopper" in choice.reason
    assert select.choose("fused", call(2, 4, 100, 64)).backend == "fused"


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (ones(2, 1, 1, 100), None),
        (ones(2, 1, 100, 100), None),
        (ones(100, 100), None),
        (ones(2, 1, 1, 100).expand(2, 4, 100, 100), None),
        (ones(2, 1, 100, 100).expand(2, 4, 100, 100), None),
        (ones(2, 4, 100, 100), "the same for every head"),
        (ones(2, 1, 100, 100).mT, "lie in one piece"),
        (ones(2, 1, 100, 1), "lie in one piece"),
    ],
)
def test_masks_of_the_short_kernels(
    mask: torch.Tensor, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = pytest.importorskip("gfsa.operators.fused.short.launch")
    monkeypatch.setattr(short, "why_not_here", lambda q: None)
    found = short.why_not(OnHopper(2, 4, 100, 64), mask, 0.1)
    assert found is None if reason is None else reason in found


def test_captured_dropout_goes_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sdpa cannot keep one mask, a slower fused kernel still beats the dense operator."""
    monkeypatch.setattr(select, "_generator_is_out_of_reach", lambda device: True)
    choice = select.choose("auto", call(2, 4, 300, 128, dropout_p=0.1))
    assert choice.backend == "fused"
    assert "sdpa does not" in choice.reason


def test_a_cpu_is_told_so() -> None:
    q = torch.randn(1, 1, 8, 16)
    assert "need an NVIDIA GPU" in which_backend(q, q, q, torch.ones(3)).reason


def test_other_tensors_than_plain_ones() -> None:
    made = call(2, 4, 100, 64)
    made.q.is_nested = True
    assert "plain tensors" in support.why_not(made)


def test_the_choice_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, the choice is made once and leaves no break."""
    monkeypatch.setattr(support, "_why_not_here", lambda q: None)
    # the question itself as the compiler sees it, a constant; only the GPU is made up
    monkeypatch.setattr(support, "capability", CAPABILITY)
    monkeypatch.setattr(support, "_capability", lambda device: (9, 0))

    def chosen(q: torch.Tensor, mask: torch.Tensor, degree: int = 2) -> torch.Tensor:
        made = select.Call(q, q, q, mask, 0.0, False, degree)
        return q + 1 if select.choose("auto", made).backend == "fused" else q - 1

    q = torch.zeros(2, 1, 300, 16, dtype=torch.bfloat16)
    compiled = torch.compile(chosen, fullgraph=True, backend="eager")
    assert (compiled(q, KEYS) == 1).all()
    assert (compiled(q, torch.ones(300, 300, dtype=torch.bool)) == -1).all()
    # the compiler combines two tensors in one kernel itself, unless all is one kernel already
    assert (compiled(q, KEYS, 1) == -1).all()
    assert (compiled(q[:, :, :100], KEYS[..., :100], 1) == 1).all()
