"""The comparison methods under checkpointing, compilers, precision and threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gfsa.operators.visibility import Visibility
from gfsa_experiments import baselines
from support.families import METHODS
from support.small_baselines import IDS, apply, bert, encoder


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing(method: str, reentrant: bool) -> None:
    model = bert().train()
    apply(model, method)
    mask = torch.ones_like(IDS)
    mask[1, 4:] = 0

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(IDS, attention_mask=mask).last_hidden_state.pow(2)[mask.bool()].sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if method == "neutreno":
        with pytest.raises(RuntimeError, match="gradient_checkpointing_disable"):
            gradients()
        return
    again = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_compiled_in_one_graph(method: str) -> None:
    model = encoder().eval()
    apply(model, method)
    ids = IDS % 9
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    expected = {mask: model(ids, mask) for mask in (padding, None)}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for mask, y in expected.items():
        assert torch.equal(compiled(ids, mask), y)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(ids, padding), expected[padding]), "compiled once for all"


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_nothing_waits_for_the_device(method: str) -> None:
    # tensors without numbers: reading one on the host, which no captured graph may do, raises
    model = encoder()
    apply(model, method)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ids = mode.from_tensor(IDS % 9)
        padding = torch.zeros(2, 7, dtype=torch.bool)
        assert model(ids, padding).shape == (2, 5)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), 2)
    apply(model, method)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = model(torch.randn(2, 7, 12), src_key_padding_mask=torch.zeros(2, 7, dtype=torch.bool))
        assert y.shape == (2, 7, 12)


@pytest.mark.parametrize("method", METHODS)
def test_half_precision(method: str) -> None:
    model = encoder().eval()
    apply(model, method)
    ids = IDS % 9
    with torch.no_grad():
        exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(ids)
    y.float().sum().backward()
    for parameter in baselines.parameters_of(model):
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    # bfloat16 keeps eight bits
    assert (y.float() - exact).abs().max() <= 0.05 * exact.abs().max()
    whole = encoder().bfloat16().eval()
    apply(whole, method)
    assert all(p.dtype == torch.float32 for p in baselines.parameters_of(whole))
    with torch.no_grad():
        got = whole(ids)
    assert got.dtype == torch.bfloat16
    assert got.isfinite().all()


@torch.no_grad()
def test_a_small_scale_is_not_lost_in_bfloat16() -> None:
    x = torch.randn(2, 6, 12)
    pushed = baselines.ContraNorm(0.005)
    exact = pushed(x.bfloat16().double(), Visibility())
    got = pushed(x.bfloat16(), Visibility()).double()
    # one rounding at the end
    assert ((got - exact).abs() <= exact.abs() * 2.0**-8 + 1e-4).all()


@pytest.mark.parametrize("method", METHODS)
def test_threads_do_not_see_each_other(method: str) -> None:
    model = bert().eval()
    apply(model, method)

    @torch.no_grad()
    def run(number: int) -> Tensor:
        mask = torch.ones_like(IDS)
        mask[1, 3 + number :] = 0
        return model(IDS.roll(number, 1), attention_mask=mask).last_hidden_state

    expected = [run(number) for number in range(4)]
    wrong: list[int] = []
    start = threading.Barrier(len(expected))

    def work(number: int) -> None:
        start.wait()
        for _ in range(8):
            try:
                wrong.extend([] if torch.equal(run(number), expected[number]) else [number])
            except RuntimeError:
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(expected))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_forward_that_broke_off_leaves_nothing_behind(method: str) -> None:
    model = encoder(3)
    apply(model, method)
    ids, other = IDS % 9, IDS.flip(1) % 9
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    expected = model(ids)
    broken = model.blocks[1].mlp[0].register_forward_pre_hook(_break_off)
    with pytest.raises(KeyboardInterrupt):
        model(other, padding)
    broken.remove()
    assert torch.equal(model(ids), expected)


def _break_off(module: nn.Module, args: Any) -> None:
    raise KeyboardInterrupt
