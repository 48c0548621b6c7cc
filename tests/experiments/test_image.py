"""The image recipe: what it feeds a model, and whole runs on a few images."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gfsa_experiments.runs.run import Run, carry_out
from gfsa_experiments.tasks import image as cifar
from gfsa_experiments.tasks.image import ImageConfig, ImageTask, Normalise, crop_and_flip
from support.tiny_images import write_cifar10, write_folder
from support.tiny_runs import tiny_run

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")

SMALL = ImageConfig(
    dataset="cifar10",
    model="deit_tiny",
    depth=2,
    patch_size=16,
    max_steps=3,
    batch_size=8,
    ema=0.0,
    workers=0,
    tensorboard=False,
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_cifar10(tmp_path / "data", per_file=16)
    return tmp_path / "data"


def run(data: Path, method: str = "plain", out: str = "runs", **settings: Any) -> Run:
    return tiny_run("image", SMALL, data, data.parent / out, method, **settings)


def made(data: Path, **settings: Any) -> ImageTask:
    config = dataclasses.replace(SMALL, **settings)
    config.check()
    torch.manual_seed(config.seed)
    return ImageTask(config, data)


def a_batch(task: ImageTask, count: int = 8) -> dict[str, torch.Tensor]:
    split = task.splits["train"]
    fetch = getattr(split.dataset, "__getitems__", lambda some: [split.dataset[i] for i in some])
    batch: dict[str, torch.Tensor] = split.collate(fetch(list(range(count))))
    return batch


@pytest.mark.parametrize("method", ["plain", "gfsa"])
def test_a_run_from_files_to_row(data: Path, method: str) -> None:
    row = carry_out(run(data, method, lens=method == "gfsa"))
    assert row.task == "cifar10 deit_tiny-d2"
    assert row.metric == "accuracy"
    assert 0 <= row.test <= 100
    assert row.steps == 3
    assert row.added == (18 if method == "gfsa" else 0)
    if method == "gfsa":
        assert row.moved is not None
        assert row.moved > 0
        assert (run(data, method, lens=True).folder / "lens.html").exists()


@pytest.mark.parametrize("dataset", ["cifar10", "folder"])
def test_an_interrupted_run_goes_on_with_the_same_random_images(
    data: Path, monkeypatch: pytest.MonkeyPatch, dataset: str
) -> None:
    settings = {"max_steps": 4, "checkpoint_every": 2, "dataset": dataset, "erase": 0.5}
    if dataset == "folder":
        write_folder(data, {"train": 12, "val": 2, "test": 2})
        settings["image_size"] = 32
    whole = carry_out(run(data, out="whole", **settings))
    loss, calls = ImageTask.loss, []

    def fails_at_the_fourth(*given: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("power cut")
        return loss(*given)

    cut = run(data, out="cut", **settings)
    monkeypatch.setattr(ImageTask, "loss", fails_at_the_fourth)
    with pytest.raises(RuntimeError, match="power cut"):
        carry_out(cut)
    monkeypatch.setattr(ImageTask, "loss", loss)
    row = carry_out(dataclasses.replace(cut, resume=True))
    assert (row.test, row.valid, row.others) == (whole.test, whole.valid, whole.others)


@pytest.mark.parametrize("model", cifar.MODELS)
def test_models_of_the_paper_take_small_images(model: str) -> None:
    config = ImageConfig(dataset="cifar10", model=model, depth=0 if "swin" in model else 1)
    sketch: Any = config.sketch()
    assert sketch(torch.zeros(1, 3, 32, 32, device=next(sketch.parameters()).device)).shape == (
        1,
        2,
    )


def test_parts_are_the_same_for_every_seed_and_disjoint(data: Path) -> None:
    one, other = made(data, seed=0), made(data, seed=1)
    assert {part: len(split) for part, split in one.splits.items()} == {
        "train": 72,
        "valid": 8,
        "test": 10,
    }
    images = {
        part: [task.splits[part].dataset.columns["images"] for task in (one, other)]  # type: ignore[attr-defined]
        for part in ("train", "valid")
    }
    assert all(torch.equal(*both) for both in images.values())
    seen = [image.numpy().tobytes() for both in images.values() for image in both[0]]
    assert len(set(seen)) == 80
    # weights, however, are drawn by the seed
    assert not torch.equal(one.model.head.weight, other.model.head.weight)


def test_timms_transforms_depend_on_seed_epoch_and_index(data: Path) -> None:
    write_folder(data, {"train": 4, "val": 2, "test": 2})
    task = made(data, dataset="folder", image_size=32)
    train = task.splits["train"].dataset
    first = train[3]["images"]
    assert first.shape == (3, 32, 32)
    assert torch.equal(train[3]["images"], first)
    train.epoch = 1  # type: ignore[attr-defined]
    assert not torch.equal(train[3]["images"], first)
    valid = task.splits["valid"].dataset
    assert torch.equal(valid[2]["images"], valid[2]["images"])


def test_crops_and_mirrors() -> None:
    pixels = torch.randint(1, 256, (64, 8, 8, 3), dtype=torch.uint8)
    changed = crop_and_flip(pixels, 2)
    assert changed.shape == pixels.shape
    assert changed.dtype == torch.uint8
    padded = torch.nn.functional.pad(pixels, (0, 0, 2, 2, 2, 2))
    seen = set()
    for image, source in zip(changed, padded, strict=True):
        found = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if torch.equal(
                image.flip(1) if mirrored else image, source[top : top + 8, left : left + 8]
            )
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 25
    assert torch.equal(crop_and_flip(pixels, 0).sort(2).values, pixels.sort(2).values)


def mixing(data: Path, classes: int, std: float, **settings: float) -> ImageTask:
    """A task of so many classes that takes pixels as they are, but for a factor."""
    off = {"mixup": 0.0, "cutmix": 0.0, "erase": 0.0, "smoothing": 0.0}
    task = made(data, **(off | settings))
    task.num_classes, task.normalise = classes, Normalise((0.0,) * 3, (std,) * 3)
    return task


def test_mixing_weighs_images_and_labels_alike(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Image i is i everywhere, and so is its label: a mixed image's mean is its mixed label's."""
    count = 8
    monkeypatch.setattr(cifar, "_PADDING", 0)
    pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 16, 16, 3)
    batch = {"images": pixels.contiguous(), "labels": torch.arange(count)}
    shares = []
    for mixup, cutmix in ((0.8, 0.0), (0.0, 1.0), (0.8, 1.0)):
        task = mixing(data, count, 1 / 255, mixup=mixup, cutmix=cutmix)
        for _ in range(20):
            mixed = task.prepare(batch)
            targets = mixed["targets"]
            assert torch.allclose(targets.sum(1), torch.ones(count))
            expected = targets @ torch.arange(count, dtype=torch.float32)
            assert torch.allclose(mixed["images"].mean((1, 2, 3)), expected, atol=1e-4)
            shares.append(float(targets[0, 0]))
            inside_one = mixed["images"][0].unique()
            if not mixup:
                assert set(inside_one.tolist()) <= {0.0, 7.0}
            elif not cutmix:
                assert len(inside_one) == 1
    assert 0.3 < sum(shares) / len(shares) < 0.7
    assert len(set(shares)) > 40


def test_labels_are_smoothed_where_nothing_is_mixed(data: Path) -> None:
    batch = {"images": torch.zeros(2, 4, 4, 3, dtype=torch.uint8), "labels": torch.tensor([0, 3])}
    expected = torch.full((2, 5), 0.02)
    expected[0, 0] = expected[1, 3] = 0.92
    task = mixing(data, 5, 1.0, smoothing=0.1)
    assert torch.allclose(task.prepare(batch)["targets"], expected)
    # as for images in folders
    task.normalise = None
    assert torch.allclose(task.prepare(batch)["targets"], expected)


def test_timm_draws_from_torchs_generator_and_leaves_others_alone(data: Path) -> None:
    task = mixing(data, 4, 1.0, mixup=0.8, cutmix=1.0, erase=0.5, smoothing=0.1)
    batch = {"images": torch.randint(256, (4, 8, 8, 3)).byte(), "labels": torch.arange(4)}
    kept = batch["images"].clone()
    states = np.random.get_state()[1].copy(), random.getstate()
    torch.manual_seed(5)
    one = task.prepare(batch)
    torch.manual_seed(5)
    assert torch.equal(task.prepare(batch)["images"], one["images"])
    assert not torch.equal(task.prepare(batch)["images"], one["images"])
    assert torch.equal(batch["images"], kept)
    assert np.array_equal(np.random.get_state()[1], states[0])
    assert random.getstate() == states[1]
    with pytest.raises(ValueError, match="even batch_size"):
        task.prepare({"images": kept[:3], "labels": torch.arange(3)})
