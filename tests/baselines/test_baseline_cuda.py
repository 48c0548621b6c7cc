"""On a GPU: no method waits for the device, and a step with it can be captured and replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gfsa_experiments import baselines
from support.encoder import Encoder
from support.families import METHODS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=METHODS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    method = METHODS[request.param]
    encoder = Encoder(9, dim=32, num_heads=4, ffn_dim=64).cuda()
    baselines.apply(encoder, method.name, **method.options)
    with torch.no_grad():
        for parameter in baselines.parameters_of(encoder):
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return encoder


def batch() -> tuple[Tensor, Tensor]:
    padding = torch.zeros(4, 50, dtype=torch.bool)
    padding[1, 20:] = True
    return torch.randint(9, (4, 50)).cuda(), padding.cuda()


def step(model: nn.Module, ids: Tensor, padding: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        y = model(ids, padding)
    y.float().pow(2).sum().backward()
    return y


def test_captured_and_replayed(model: nn.Module) -> None:
    ids, padding = batch()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = step(model, ids, padding).detach().clone()
    torch.cuda.current_stream().wait_stream(side)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(model, ids, padding)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, expected, rtol=1e-2, atol=1e-2)
    again = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(again, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2 * b.abs().max().item())


@torch.no_grad()
def test_as_on_the_cpu(model: nn.Module) -> None:
    ids, padding = batch()
    on_device = model(ids, padding).cpu()
    expected = model.cpu()(ids.cpu(), padding.cpu())
    torch.testing.assert_close(on_device, expected, rtol=1e-3, atol=1e-3)
