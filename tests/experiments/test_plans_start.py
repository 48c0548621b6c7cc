"""Every line of the plans and families that wait for a GPU trains two steps on a CPU, on tiny data.

What a plan asks of the GPU (compiled blocks, CUDA graphs, bfloat16) is left out; the data, the
batch, the rates and the pretrained model are tiny, and so is the width of pretraining's decoder.
Methods, their options, the models that are trained from scratch and the way to a row are those of
the plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.results.families import read_family
from gfsa_experiments.runs.run import Run, carry_out
from gfsa_experiments.tasks.image import cifar
from support.graph_files import write_zinc
from support.tiny_images import write_cifar10
from support.tiny_pretraining import write_corpus
from support.tiny_texts import corpus, save_model, write, write_glue

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*results are not those of the official"),
]

RESULTS = Path(__file__).parents[2] / "results"
FILES = (
    "plans/causal_lm-dropout.txt",
    "plans/causal_lm-epochs.txt",
    "plans/causal_lm-peers.txt",
    "plans/causal_lm-time.txt",
    "plans/image-peers.txt",
    "plans/image-tuning.txt",
    "plans/pretrain-controls-rates.txt",
    "plans/pretrain-controls.txt",
    "plans/pretrain-epoch-high-rates.txt",
    "plans/pretrain-epoch-tuning.txt",
    "plans/pretrain-gates.txt",
    "plans/pretrain-layers.txt",
    "plans/pretrain-long-warmup.txt",
    "plans/pretrain-warmup.txt",
    "plans/stsb-streams.txt",
    "plans/zinc-tuning-high.txt",
    "families/cifar10.toml",
    "families/pretrain-epoch-best.toml",
    "families/pretrain-epoch.toml",
    "families/pretrain-gates.toml",
    "families/stsb.toml",
    "families/zinc.toml",
)

ON_A_CPU: dict[str, Any] = {
    "compile": "no",
    "graphs": False,
    "precision": "fp32",
    "eval_batch_size": 0,
}


def runs_of(file: Path) -> list[Run]:
    if file.suffix == ".toml":
        family = read_family(file)
        return [run for pair in family.comparisons for runs in pair.runs.values() for run in runs]
    return runs_of_plan(file)


def lines_of(runs: list[Run]) -> list[Run]:
    """One run of each method with its options and settings, that of the first seed."""
    first: dict[tuple[str, ...], Run] = {}
    for run in runs:
        first.setdefault(run.key()[:-1], run)
    return list(first.values())


def tiny_images(folder: Path) -> dict[str, Any]:
    write_cifar10(folder, per_file=16)
    cifar._read.cache_clear()
    return {}


def tiny_molecules(folder: Path) -> dict[str, Any]:
    write_zinc(folder)
    return {}


def tiny_pairs_of_sentences(folder: Path) -> dict[str, Any]:
    write_glue(folder, "STS-B")
    dev = (folder / "STS-B" / "dev.tsv").read_text()
    write(folder / "stsb_test.tsv", dev)
    return {"model": str(save_model(folder / "bert", "bert"))}


def tiny_text(folder: Path) -> dict[str, Any]:
    for part, count in (("train", 300), ("valid", 60), ("test", 60)):
        write(folder / f"wikitext-2/wiki.{part}.tokens", corpus(count))
    return {"block": 16}


def tiny_documents(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    write_corpus(folder)
    narrow = {"width": 32, "heads": 2, "head_dim": 16, "mlp": 64}
    return {"vocab_size": 300, "block": 16, "eval_rows": 4, "probes": 2, **narrow}


DATA: dict[str, Callable[[Path], dict[str, Any]]] = {
    "image": tiny_images,
    "graph": tiny_molecules,
    "glue": tiny_pairs_of_sentences,
    "causal_lm": tiny_text,
    "pretrain": tiny_documents,
}


@pytest.mark.parametrize("file", FILES)
def test_every_line_trains_two_steps(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GFSA_CACHE", str(tmp_path / "cache"))
    lines = lines_of(runs_of(RESULTS / file))
    changes = DATA[lines[0].recipe](tmp_path / "data")
    for run in lines:
        # two steps at the whole rate may end above the beginning, which is taken for divergence
        whole = {"lr": run.config.lr, "gain_lr": run.config.gain_lr}
        rates = {name: rate / 10 for name, rate in whole.items() if rate is not None}
        small = {"max_steps": 2, "batch_size": 4, **rates, **ON_A_CPU, **changes}
        config = dataclasses.replace(run.config, **small)
        places: dict[str, Any] = {"data_dir": tmp_path / "data", "out": tmp_path / "runs"}
        row = carry_out(dataclasses.replace(run, config=config, device="cpu", **places))
        assert (row.method, row.options, row.steps) == (run.method, run.key().options, 2)
        assert row.metric in ("accuracy", "loss", "mae", "spearman", "perplexity")
        # two steps may leave every prediction of a tiny set the same: no rank correlation
        assert math.isfinite(row.test) or row.metric == "spearman", run
