"""Steps of the text recipes ask the device for nothing, so that they can be captured as graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

import gfsa
from gfsa_experiments.engine.task import Task
from gfsa_experiments.tasks.causal_lm.recipe import CausalLMConfig, CausalLMTask
from gfsa_experiments.tasks.code.recipe import CodeConfig, CodeTask
from gfsa_experiments.tasks.glue.recipe import GlueConfig, GlueTask
from support.tiny_texts import corpus, save_model, write, write_clones, write_glue

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")
_ASKING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
_INDEXING = {"aten::index.Tensor", "aten::index_put", "aten::index_put_"}


class Questions(TorchDispatchMode):
    """Operations whose result the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func.name() in _INDEXING and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if func.name() in _ASKING or by_mask:
            self.asked.append(func.name())
        return func(*args, **(kwargs or {}))


def glue(folder: Path) -> Task:
    write_glue(folder, "RTE")
    model = str(save_model(folder / "bert", "bert"))
    return GlueTask(GlueConfig(task="rte", model=model), folder)


def causal_lm(folder: Path) -> Task:
    for part in ("train", "valid", "test"):
        write(folder / f"wiki.{part}.tokens", corpus(20))
    sizes = CausalLMConfig(model="scratch", tokenizer="bpe", vocab_size=300, block=16)
    return CausalLMTask(dataclasses.replace(sizes, depth=2, width=16, heads=2), folder)


def clones(kind: str) -> Callable[[Path], Task]:
    def make(folder: Path) -> Task:
        write_clones(folder)
        model = str(save_model(folder / kind, kind))
        return CodeTask(CodeConfig(dataset="bigclonebench", model=model, max_length=24), folder)

    return make


@pytest.mark.parametrize(
    "make",
    # not PLBART: it draws a number for each layer on the host, which looks the same on a CPU
    [glue, causal_lm, clones("roberta"), clones("t5")],
    ids=["glue", "causal_lm", "roberta", "t5"],
)
@pytest.mark.parametrize("filtered", [False, True])
def test_a_step_asks_nothing(
    make: Callable[[Path], Task], filtered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make(tmp_path)
    if filtered:
        gfsa.plug(task.model)
    batch = task.splits["train"].dataset.__getitems__([0, 1, 2])  # type: ignore[attr-defined]
    # what transformers answers while a CUDA graph is captured
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *tensors: True)
    task.model.train()
    with Questions() as questions:
        task.loss(task.model, batch).backward()
    assert questions.asked == []
