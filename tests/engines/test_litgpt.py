"""litgpt: its GPT with filters, traced as a class that these tests have verified."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import litgpt.model
import pytest
import torch
from lightning import Fabric
from litgpt import GPT, Config
from litgpt import lora as litgpt_lora
from torch import Tensor, nn

import gfsa
from gfsa.plugs.tracing.capture import TraceError
from support.plugging import check_backbone, filtered_softmax, randomise

LENGTH = 24
TINY: dict[str, Any] = {
    "name": "tiny",
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "block_size": LENGTH,
    "vocab_size": 64,
    "padded_vocab_size": 64,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 64,
    "bias": False,
    "rotary_percentage": 1.0,
}
SOFTCAPPED = {"attention_logit_softcapping": 2.0, "attention_scores_scalar": 12}
WINDOW = {"sliding_window_size": 5, "sliding_window_indices": [1, 0]}
MODELS = {
    "heads of their own keys": {},
    "grouped": {"n_query_groups": 2},
    "one key for all": {"n_query_groups": 1},
    "softcapped": {"n_query_groups": 2, **SOFTCAPPED},
    "sliding window": WINDOW,
    "softcapped, sliding window": {**WINDOW, **SOFTCAPPED},
}


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(Config(**TINY | changes)).eval()


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_attention(
    kind: str, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # litgpt takes the softmax of softcapped scores in torch.float, in a model in float64 too, which
    # would hide differences from the formula
    precise = SimpleNamespace(**vars(torch) | {"float": torch.float64})
    monkeypatch.setattr(litgpt.model, "torch", precise)
    report = check_backbone(lambda: gpt(**MODELS[kind]), lambda model: model(ids), tmp_path)
    assert list(report.plugged) == ["transformer.h.0.attn", "transformer.h.1.attn"]


def test_training_moves_the_filters(ids: Tensor, tmp_path: Path) -> None:
    model = gpt(n_query_groups=2).train()
    gfsa.plug(model)
    groups = gfsa.parameter_groups(model, lr=1e-3, filter_lr=1e-1, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)
    losses = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(f.theta.abs().min() > 1e-3 for f in gfsa.filters_of(model).values())
    gfsa.save(model, tmp_path / "filters")
    other = gpt(n_query_groups=2)
    other.load_state_dict({k: v for k, v in model.state_dict().items() if ".gfsa." not in k})
    gfsa.load(other, tmp_path / "filters")
    assert torch.equal(other(ids), model.eval()(ids))
    # a checkpoint of litgpt is a state dict
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))


def test_low_rank_updates_beside_filters(ids: Tensor) -> None:
    torch.manual_seed(0)
    config = litgpt_lora.Config(**TINY, n_query_groups=2, lora_r=2, lora_query=True)
    model = litgpt_lora.GPT(config)
    plain = model(ids)
    gfsa.plug(model)
    assert torch.equal(model(ids), plain)
    randomise(model)(ids).sum().backward()
    assert all(f.theta.grad.abs().max() > 0 for f in gfsa.filters_of(model).values())


def test_weights_that_fabric_leaves_empty(ids: Tensor) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    with fabric.init_module(empty_init=True):
        model = GPT(Config(**TINY))
    gfsa.plug(model)
    model.load_state_dict(gpt().state_dict(), strict=False)
    assert torch.equal(model.eval()(ids), gpt()(ids))


def test_its_cache_is_refused(ids: Tensor) -> None:
    model = gpt()
    gfsa.plug(model)
    model.set_kv_cache(2)
    with pytest.raises(TraceError, match=r"its map is 3×24, .* decoding with a cache"):
        model(ids[:, :3], torch.arange(3))


def test_without_a_cache_it_generates(ids: Tensor) -> None:
    model = gpt()
    gfsa.plug(model)
    coefficients = [f.coefficients().detach() for f in gfsa.filters_of(randomise(model)).values()]
    plain = gpt()

    def dense(ids: Tensor) -> Tensor:
        with filtered_softmax(plain, coefficients):
            return plain(ids)

    texts = [continued(decoder, ids[:1, :4]) for decoder in (model, dense, plain)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def continued(model: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """Twelve greedy tokens from whole prefixes."""
    for _ in range(12):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids


def test_what_a_step_costs(costs: Any) -> None:
    wide = {"n_embd": 128, "intermediate_size": 384, "block_size": 256, "n_query_groups": 2}
    filtered, plain = gpt(**wide).train(), gpt(**wide).train()
    gfsa.plug(filtered, K=3)
    ids = torch.randint(64, (2, 256), generator=torch.Generator().manual_seed(3))

    def step(model: GPT) -> None:
        model(ids).logsumexp(-1).mean().backward()
        model.zero_grad()

    costs(step, filtered, plain)
