"""Probes of trained decoders: against models whose behaviour is known, and against dense maps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa_experiments.runs.run import carry_out
from gfsa_experiments.tasks.pretrain.data import TokenRows
from gfsa_experiments.tasks.pretrain.probes import probe
from support.tiny_pretraining import SMALL, a_run, built, write_corpus

VOCABULARY = 60
# so many that random tokens hardly repeat by chance
MANY = 4000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GFSA_CACHE", str(root / "cache"))
        yield write_corpus(root)


class Copies(nn.Module):
    """Predicts what followed the last occurrence of the present token, all else being equal."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, **unused: Any) -> Any:
        logits = torch.zeros(*input_ids.shape, MANY)
        for row, tokens in enumerate(input_ids.tolist()):
            follows: dict[int, int] = {}
            for place, token in enumerate(tokens):
                if place:
                    follows[tokens[place - 1]] = token
                if token in follows:
                    logits[row, place, follows[token]] = 30.0
        return SimpleNamespace(logits=logits)


def rows_of(tokens: list[int] | Tensor, block: int) -> TokenRows:
    return TokenRows(np.asarray(tokens, dtype=np.uint16), block, "valid")


@pytest.fixture
def text() -> TokenRows:
    numbers = torch.randint(MANY, (5 * 32 + 1,), generator=torch.Generator().manual_seed(1))
    numbers[-1] = MANY - 1
    return rows_of(numbers, 32)


def test_a_model_that_copies_is_seen_to_copy(
    text: TokenRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gfsa_experiments.tasks.pretrain.probes._maps", lambda model, ids: {})
    found = probe(Copies(), text, text, None, rows=5)
    for name in ("induction", "recall"):
        assert found[name]["first"] > 0.8 * math.log(MANY), name
    assert found["induction"]["second"] < 0.1
    assert found["recall"]["second"] < 0.1


def test_losses_are_sorted_by_position_and_frequency(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Prefers(nn.Module):
        """Gives every token t the loss of logits −t at even places, equal logits at odd ones."""

        def __init__(self) -> None:
            super().__init__()
            self.number = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: Tensor, **unused: Any) -> Any:
            logits = -torch.arange(VOCABULARY).float().expand(*input_ids.shape, VOCABULARY)
            return SimpleNamespace(logits=logits)

    monkeypatch.setattr("gfsa_experiments.tasks.pretrain.probes._maps", lambda model, ids: {})
    # token t follows t times in the training text: a rarer token is a smaller one
    train = rows_of([t for t in range(VOCABULARY) for _ in range(t)], 16)
    valid = rows_of([*range(10, 50), 0], 20)
    found = probe(Prefers(), valid, train, None, rows=2)
    rest = math.log(sum(math.exp(-t) for t in range(VOCABULARY)))
    # 20 losses in a row: 1, 2, 4, 8 and 5 of them; tokens 11 … 30 and 31 … 49, 0
    assert len(found["position"]) == 5
    assert found["position"][0] == pytest.approx((11 + 31) / 2 + rest, rel=1e-5)
    assert found["position"][1] == pytest.approx((12.5 + 32.5) / 2 + rest, rel=1e-5)
    assert found["frequency"] == sorted(found["frequency"])
    assert found["frequency"][0] == pytest.approx((0 + 11 + 12 + 13) / 4 + rest, rel=1e-5)


@pytest.mark.parametrize("filtered", [False, True])
def test_sinks_and_entropies_are_those_of_the_dense_map(filtered: bool, data: Path) -> None:
    task = built(data)
    model = task.model
    if filtered:
        gfsa.plug(model)
        for filter in gfsa.filters_of(model).values():
            nn.init.normal_(filter.theta, std=0.3)
    before = {*model.state_dict()}
    found = probe(model, task.rows["valid"], task.rows["train"], None, rows=3)
    assert {*model.state_dict()} == before
    ids = task.rows["valid"].ids(task.rows["valid"].__getitems__([0, 1, 2]))[:, :-1]
    maps = _dense_maps(model, ids)
    for layer, a in enumerate(maps):
        sink = a[..., 1:, 0].mean((0, 2))
        torch.testing.assert_close(torch.tensor(found["sink"][layer]), sink)
        entropy = -(a * a.clamp_min(1e-30).log()).sum(-1)[..., 1:]
        share = entropy / torch.arange(2, a.shape[-1] + 1).log()
        torch.testing.assert_close(torch.tensor(found["entropy"][layer]), share.mean((0, 2)))


def _dense_maps(model: Any, ids: Tensor) -> list[Tensor]:
    """softmax(q·kᵀ) of every layer, from what the layer's own norms and rotation give."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    maps = []
    for layer in model.model.layers:

        def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            x = kwargs["hidden_states"]
            shape = (*x.shape[:-1], -1, module.head_dim)
            q = module.q_norm(module.q_proj(x).view(shape)).transpose(1, 2)
            k = module.k_norm(module.k_proj(x).view(shape)).transpose(1, 2)
            q, k = apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
            scores = q @ k.mT * module.scaling
            seen = torch.ones(scores.shape[-2:]).tril().bool()
            maps.append(scores.masked_fill(~seen, -math.inf).softmax(-1))

        handle = layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
        layer.probe_handle = handle
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for layer in model.model.layers:
        layer.probe_handle.remove()
    return maps


@pytest.mark.parametrize("method", ["plain", "gfsa"])
def test_a_run_writes_its_probes(method: str, data: Path, tmp_path: Path) -> None:
    run = a_run(data, tmp_path, method, probes=3)
    row = carry_out(run)
    assert "probes" not in row.settings
    found = json.loads((run.folder / "probes.json").read_text())
    assert {*found} == {"induction", "recall", "position", "frequency", "entropy", "sink"}
    assert len(found["sink"]) == SMALL.depth
