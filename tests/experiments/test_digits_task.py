"""The digits task and the demo's runs: paired, reproducible, and on images they may see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.progress import Progress

import gfsa
from gfsa_experiments.demo.comparison import DemoSettings
from gfsa_experiments.demo.run_demo import Trained, train_all
from gfsa_experiments.tasks import find_recipe
from gfsa_experiments.tasks.digits.recipe import DigitsConfig, DigitsViT, load_digits

TINY = DemoSettings("digits", seeds=1, epochs=1, depth=2, held_out="validation", jobs=1)


def small(filtered: bool = False, **options: object) -> DigitsViT:
    torch.manual_seed(0)
    model = DigitsViT(depth=3, width=16, heads=2).eval()
    if filtered:
        gfsa.plug(model, **options)  # type: ignore[arg-type]
    return model


def train_tiny() -> Trained:
    return train_all(TINY, Progress(disable=True))


def test_patches_are_the_image_cut_in_squares() -> None:
    model = small()
    image = torch.arange(64.0).reshape(1, 8, 8)
    entering = model.tokens(image)[0][:, 1:] - model.position
    # the second token is the square of rows 0–1 and columns 2–3
    square = torch.tensor([2.0, 3.0, 10.0, 11.0])
    torch.testing.assert_close(entering[0, 1], model.embed(square))


def test_splits_share_no_image() -> None:
    parts = load_digits()
    sizes = {name: len(part) for name, part in parts.items()}
    assert sum(sizes.values()) == 1797
    # the images are unique, so the sets of them must be disjoint
    images = {
        name: {tuple(image.flatten().tolist()) for image in part.columns["images"]}
        for name, part in parts.items()
    }
    assert {name: len(part) for name, part in images.items()} == sizes
    assert images["train"].isdisjoint(images["valid"] | images["test"])
    assert images["valid"].isdisjoint(images["test"])


def test_the_task_reports_accuracy_on_every_split() -> None:
    config = DigitsConfig(depth=1, width=16, heads=2)
    config.check()
    task = find_recipe("digits").build(config, Path())
    for name, split in task.splits.items():
        batch = split.dataset.__getitems__([0, 1, 2])  # type: ignore[attr-defined]
        assert batch["images"].shape == (3, 8, 8), name
        assert task.loss(task.model, batch).isfinite()
        wrong = ~task.predict(task.model, batch)
        assert task.score([wrong, ~wrong])["accuracy"] == 50.0
    with pytest.raises(ValueError, match="multiple of heads"):
        DigitsConfig(width=10, heads=4).check()


def test_the_same_seed_gives_the_same_numbers_and_filters_learn() -> None:
    first, second = train_tiny().runs, train_tiny().runs
    for run, again in zip(first, second, strict=True):
        assert (run.row.test, run.similarity, run.coefficients) == (
            again.row.test,
            again.similarity,
            again.coefficients,
        )
        # the set that the settings ask for
        assert run.row.test == run.row.valid
    assert [run.row.method for run in first] == list(TINY.variants())
    plain, degree1, high = first
    # 2 layers of 4 heads, with 2 and 3 coefficients per head
    assert [run.row.added for run in first] == [0, 16, 24]
    assert [run.row.parameters - plain.row.parameters for run in first] == [0, 16, 24]
    for run, start in ((degree1, [0.0, 1.0]), (high, [0.0, 1.0, 0.0])):
        moved = torch.tensor(run.coefficients) - torch.tensor(start)
        assert moved.abs().min() > 0
    assert [len(run.similarity) for run in first] == [3, 3, 3]
