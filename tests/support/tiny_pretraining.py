"""A tiny corpus and decoder for tests of pretraining."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from gfsa_experiments.runs.run import Run
from gfsa_experiments.tasks.pretrain.recipe import LanguageTask, PretrainConfig
from support.tiny_runs import tiny_run
from support.tiny_texts import sentence

SMALL = PretrainConfig(
    vocab_size=300,
    block=16,
    depth=2,
    width=32,
    heads=2,
    head_dim=16,
    mlp=64,
    batch_size=8,
    eval_rows=5,
    max_steps=3,
    lr=1e-2,
    precision="fp32",
    tensorboard=False,
)


def document(number: int) -> str:
    return " ".join(sentence(number + i) for i in range(4)) + "\n"


def write_corpus(root: Path) -> Path:
    """``root`` as a ``--data-dir`` with a small techdocs."""
    (root / "techdocs").mkdir()
    for part, documents in (("train", 60), ("valid", 12), ("test", 14)):
        text = "\0".join(map(document, range(documents)))
        (root / f"techdocs/techdocs.{part}.txt").write_text(text)
    return root


def built(data_dir: Path, **settings: Any) -> LanguageTask:
    config = dataclasses.replace(SMALL, **settings)
    config.check()
    torch.manual_seed(config.seed)
    return LanguageTask(config, data_dir)


def a_batch(task: LanguageTask, part: str = "train", rows: int = 4) -> dict[str, Any]:
    return task.rows[part].__getitems__(list(range(rows)))


def a_run(data: Path, out: Path, method: str = "plain", **settings: Any) -> Run:
    return tiny_run("pretrain", SMALL, data, out, method, **settings)
