"""The LRA recipe: what it feeds the encoder, and whole runs on a few sequences."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gfsa
from gfsa.operators import LinearOperator
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.run import Run, carry_out
from gfsa_experiments.tasks import lra
from gfsa_experiments.tasks.image import data as cifar
from gfsa_experiments.tasks.listops import make_listops, read_listops, store
from gfsa_experiments.tasks.lra import LraConfig, LraTask, build
from support.tiny_images import write_cifar10

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")

SMALL = LraConfig(
    dim=16,
    depth=1,
    num_heads=2,
    ffn_dim=16,
    projected=8,
    max_steps=2,
    batch_size=4,
    pad_to_multiple=128,
    tensorboard=False,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    lists = make_listops(counts={"train": 12, "val": 4, "test": 4})
    store(folder / "listops" / "listops_seed0.npz", lists)
    write_cifar10(folder / "cifar10", per_file=4, test=4)
    return folder


@pytest.fixture(autouse=True)
def _read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GFSA_CACHE", raising=False)
    for cache in (cifar.read_cifar, read_listops, lra._images):
        cache.cache_clear()


def run(data: Path, out: Path, method: str = "plain", **settings: Any) -> Run:
    return Run(
        recipe="lra",
        config=dataclasses.replace(SMALL, **settings),
        method=method,
        options=MethodConfig(filter_lr=1e-2) if method == "gfsa" else MethodConfig(),
        data_dir=data,
        out=out,
        device="cpu",
    )


def made(data: Path, **settings: Any) -> LraTask:
    config = dataclasses.replace(SMALL, **settings)
    config.check()
    torch.manual_seed(0)
    return build(config, data)


def a_batch(task: LraTask, count: int = 4) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = task.splits["train"].dataset.__getitems__(  # type: ignore[attr-defined]
        list(range(count))
    )
    return batch


@pytest.mark.parametrize(
    ("task", "attention", "method"),
    [
        ("listops", "softmax", "gfsa"),
        ("image", "efficient", "gfsa"),
        ("listops", "linformer", "plain"),
    ],
)
def test_a_run_from_files_to_row(
    data: Path, tmp_path: Path, task: str, attention: str, method: str
) -> None:
    row = carry_out(run(data, tmp_path, method, task=task, attention=attention))
    assert row.task == f"{task} {attention}"
    assert row.metric == "accuracy"
    assert row.steps == 2
    assert row.seconds_per_step > 0
    assert row.added == (6 if method == "gfsa" else 0)
    assert row.moved is None or row.moved > 0


@pytest.mark.parametrize("attention", ["softmax", "efficient"])
@pytest.mark.parametrize("task", ["listops", "image"])
def test_plugging_changes_nothing_at_first(data: Path, task: str, attention: str) -> None:
    made_task = made(data, task=task, attention=attention)
    made_task.model.eval()
    batch = a_batch(made_task)
    before = made_task.loss(made_task.model, batch)
    gfsa.plug(made_task.model, K=3)
    after = made_task.loss(made_task.model, batch)
    assert torch.equal(after, before)
    after.backward()
    for one in gfsa.filters_of(made_task.model).values():
        assert one.theta.grad.abs().min() > 0


def test_efficient_attention_is_filtered_by_the_linear_operator(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = made(data, attention="efficient")
    gfsa.plug(task.model, K=3)
    seen = []
    (made_filter,) = gfsa.filters_of(task.model).values()
    made_filter.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    task.predict(task.model, a_batch(task))
    assert [type(operator) for operator in seen] == [LinearOperator]


def test_padding_is_a_mask_over_keys(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape that attention kernels take without building n×n entries."""
    task = made(data)
    masks = []
    task.model.blocks[0].register_forward_pre_hook(lambda _, inputs: masks.append(inputs[1]))
    batch = a_batch(task)
    task.predict(task.model, batch)
    assert masks[0].dtype == torch.bool
    assert masks[0].shape == (4, 1, 1, batch["tokens"].shape[1] + 1)
    pixels = made(data, task="image")
    pixels.model.blocks[0].register_forward_pre_hook(lambda _, inputs: masks.append(inputs[1]))
    pixels.predict(pixels.model, a_batch(pixels))
    assert masks[1] is None


def test_padding_changes_no_answer(data: Path) -> None:
    for attention in ("softmax", "efficient"):
        little = made(data, attention=attention)
        full = made(data, attention=attention, pad_to_multiple=0)
        for task in (little, full):
            task.model.eval()
        short, long = a_batch(little), a_batch(full)
        assert long["tokens"].shape == (4, 1999)
        assert short["tokens"].shape[1] < 1999
        assert (short["tokens"].shape[1] + 1) % 128 == 0
        assert torch.allclose(
            little.logits(little.model, short), full.logits(full.model, long), atol=1e-5
        )


def test_batches_are_the_lists_and_nothing_is_cut(data: Path) -> None:
    sequences = read_listops(data)["train"]
    batch = a_batch(made(data), 12)
    for index in range(12):
        kept = batch["tokens"][index][batch["tokens"][index] != 0]
        assert np.array_equal(kept.numpy(), sequences[index])
    assert batch["labels"].tolist() == sequences.labels.tolist()
    # lengths are there for batches of lists of like length
    assert made(data).splits["train"].lengths == sequences.lengths.tolist()


def test_the_lens_sees_a_sequence_without_padding(data: Path) -> None:
    task = made(data)
    example = task.example()
    assert example.shape == (1, len(read_listops(data)["val"][0]))
    task.model(example)
