"""Which operator serves a call: asked for by name it runs or raises, never another in silence."""

import pytest
import torch

from gfsa import graph_filter_attention
from gfsa.functional import which_backend
from gfsa.kernels import routes
from gfsa.operators import AttentionOperator

Q = torch.randn(1, 2, 5, 4)
COEFFS = torch.tensor([0.0, 1.0, 0.0])


@pytest.mark.parametrize("backend", ["dense", "sdpa"])
def test_by_name(backend: str) -> None:
    choice = which_backend(Q, Q, Q, COEFFS, backend=backend)
    assert (choice.backend, choice.reason) == (backend, "asked for by name")


def test_auto_takes_torchs_kernels_on_a_cpu_and_says_so() -> None:
    choice = which_backend(Q, Q, Q, COEFFS)
    assert choice.backend == "sdpa"
    assert "one pass a power" in choice.reason
    assert AttentionOperator(Q, Q).which(COEFFS, Q) == choice


def test_dropout_needs_no_other_backend_on_a_cpu() -> None:
    assert which_backend(Q, Q, Q, COEFFS, dropout_p=0.1).backend == "sdpa"


def test_auto_falls_back_to_the_specification_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "_generator_cannot_be_reset", lambda device: True)
    choice = which_backend(Q, Q, Q, COEFFS, dropout_p=0.1)
    assert choice.backend == "dense"
    assert "the dense operator can" in choice.reason
    # one pass has but one mask: nothing to set back
    assert which_backend(Q, Q, Q, COEFFS[:2], dropout_p=0.1).backend == "sdpa"


def test_auto_weighs_a_fused_kernel_against_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster, it is taken; slower, it is left, unless torch's kernels cannot serve at all."""
    # the decision is kept by what it depends on, of which the test replaces a part
    monkeypatch.setattr(routes, "_decided", routes._decide)
    monkeypatch.setattr(routes, "refusal_by_fused", lambda situation: None)
    monkeypatch.setattr(routes, "_reason_by_measurements", lambda situation: None)
    choice = which_backend(Q, Q, Q, COEFFS)
    assert (choice.backend, "fastest" in choice.reason) == ("fused", True)

    monkeypatch.setattr(routes, "_reason_by_measurements", lambda situation: "too short to gain")
    choice = which_backend(Q, Q, Q, COEFFS)
    assert (choice.backend, "too short to gain" in choice.reason) == ("sdpa", True)

    monkeypatch.setattr(routes, "_generator_cannot_be_reset", lambda device: True)
    choice = which_backend(Q, Q, Q, COEFFS, dropout_p=0.1)
    assert (choice.backend, "one dropout mask" in choice.reason) == ("fused", True)
    # where H is dropped, only the operator that builds it will do
    operator = AttentionOperator(Q, Q, dropout_p=0.1, dropout_after="filter")
    assert operator.which(COEFFS, Q).backend == "dense"


def test_a_captured_graph_cannot_set_the_generator_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert routes._generator_cannot_be_reset(torch.device("cuda"))
    assert not routes._generator_cannot_be_reset(torch.device("cpu"))


def test_a_name_that_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_generator_cannot_be_reset", lambda device: True)
    with pytest.raises(ValueError, match=r"backend='sdpa' cannot serve this call: one dropout"):
        graph_filter_attention(Q, Q, Q, COEFFS, dropout_p=0.1, backend="sdpa")
    with pytest.raises(ValueError, match=r"backend='fused' cannot serve this call"):
        graph_filter_attention(Q, Q, Q, COEFFS, backend="fused")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of \('auto', 'dense', 'sdpa'.*got 'flash'"):
        graph_filter_attention(Q, Q, Q, COEFFS, backend="flash")  # type: ignore[arg-type]
