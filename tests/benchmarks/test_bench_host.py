"""The host's part of a call, measured with nothing launched."""

import pytest
import torch

pytest.importorskip("triton")

from gfsa.functional import which_backend
from gfsa_benchmarks import host_calls, host_models


def test_everything_but_the_kernels_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_calls, "REPEATS", 2)
    monkeypatch.setattr(host_calls, "ROUNDS", 1)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    q = torch.zeros(1, 12, 40, 64, dtype=torch.bfloat16)
    with host_calls.nothing_launched():
        assert which_backend(q, q, q, torch.ones(3)).backend == "fused"
        found = [
            host_calls.calls(40, False),
            host_calls.calls(40, False, mask),
            host_calls.calls(300, True),
        ]
    assert which_backend(q, q, q, torch.ones(3)).backend == "sdpa"
    assert all(time > 0 for times in found for time in times.values())


def test_what_a_filter_adds_to_a_layer_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(host_models, "REPEATS", 1)
    monkeypatch.setattr(host_models, "ROUNDS", 1)
    monkeypatch.setattr(host_models, "LAYERS", 2)
    with host_calls.nothing_launched():
        training = host_models.training()
    for found in (training, host_models.decoding(static=False), host_models.decoding(static=True)):
        one, two = (found[name].added_to(found["plain"]) for name in ("degree 1", "degree 2"))
        assert 0 < one.calls < 400
        assert 0 < two.calls < 400
    host_models.report("a model", found)
    assert "degree 2 adds" in capsys.readouterr().out


def test_a_decoded_token_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(host_models, "REPEATS", 1)
    monkeypatch.setattr(host_models, "ROUNDS", 1)
    found = host_models.decoding(static=False)
    one, two = (found[name].added_to(found["plain"]) for name in ("degree 1", "degree 2"))
    # the coefficients, a product, and a sum that is rounded as well
    assert one.operators == 3
    # two more for the coefficients, the power kept, the second pass, and another sum
    assert two.operators == 8


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("static", [False, True])
def test_a_token_by_the_kernel_is_one_launch(
    kind: str, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of torch's attention; the cache of powers and the coefficients need no other.

    A filter of degree 1, which has no powers, takes fewer calls.
    """
    pytest.importorskip("transformers")
    monkeypatch.setattr(host_models, "REPEATS", 1)
    monkeypatch.setattr(host_models, "ROUNDS", 1)
    with host_calls.nothing_launched():
        found = host_models.decoding(static, kind)
    for degree, calls in ((1, 95), (2, 115)):
        added = found[f"degree {degree}"].added_to(found["plain"])
        # attention with a mask, that of free rows, is three operators more on a CPU
        assert added.operators == (-3 if static else 0)
        assert added.calls < calls


def test_calls_and_operators_are_counted() -> None:
    x = torch.ones(2, 3)

    def work() -> None:
        len(repr(abs))
        (x.t() + x.t()).sum()

    # the function itself, len and repr; two calls of t, one of sum
    assert host_models.count_calls(work) == 6 + 1  # and the call that ends the counting
    assert host_models.count_operators(work) == 2
