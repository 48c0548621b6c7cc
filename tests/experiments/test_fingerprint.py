"""What a run is on: told apart where data differs, the same wherever it does not."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from gfsa_experiments.engine.task import Split, Task, as_it_is
from gfsa_experiments.runs.run import fingerprint
from gfsa_experiments.tasks.image import ImageConfig, ImageTask, list_images, read_cifar
from gfsa_experiments.tasks.speech.data import SpeechBatches, read_speech
from gfsa_experiments.tasks.speech.recipe import SpeechTask
from support.speech import change_an4, write_an4
from support.tiny_images import write_folder

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*results are not (those of the official|comparable)"
)


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.items[index]


class Listed(Task):
    metric = "none"

    def __init__(self, **parts: list[Any] | Dataset[Any]) -> None:
        self.model = nn.Identity()
        self.splits = {
            name: Split(Items(part) if isinstance(part, list) else part, as_it_is)
            for name, part in parts.items()
        }

    def loss(self, model: nn.Module, batch: Any) -> Any: ...
    def predict(self, model: nn.Module, batch: Any) -> Any: ...
    def score(self, predictions: list[Any]) -> Any: ...


def of(*test: Any) -> str:
    """The fingerprint of a data set that has these to test on."""
    return fingerprint(Listed(train=[0], test=list(test)))


def test_it_says_how_many_and_which() -> None:
    sizes, _, digest = fingerprint(Listed(train=[1, 2, 3], valid=[4], test=[5, 6])).partition(" ")
    assert sizes == "3+1+2"
    assert len(digest) == 8
    assert int(digest, 16) >= 0
    # no part to choose on
    assert of(1, 2).startswith("1+0+2 ")


@dataclass
class Pair:
    left: Any
    right: Any


class Graph:
    """As PyG's are: an object with a dict of tensors."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to_dict(self) -> dict[str, Any]:
        return {"x": self.x}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, "1"),
        ("a", b"a"),
        ("a", "b"),
        (None, 0),
        (0.1, 0.2),
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        (torch.tensor([[1, 2]]), torch.tensor([[1], [2]])),
        (torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor([0.25], dtype=torch.bfloat16)),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        ({"x": 1}, {"y": 1}),
        ([[1], [2, 3]], [[1, 2], [3]]),
        ([["a", "b"]], [["ab"]]),
        (Pair(1, 2), Pair(2, 1)),
        (Graph(torch.zeros(2)), Graph(torch.ones(2))),
        (SimpleNamespace(x=1), SimpleNamespace(x=2)),
    ],
)
def test_other_examples_are_other_data(one: Any, other: Any) -> None:
    assert of(one) == of(one)
    assert of(one) != of(other)
    # the last of many is looked at too
    assert of(*range(1000), one) != of(*range(1000), other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.arange(3), torch.arange(3, dtype=torch.uint8)),
        (torch.tensor([0.5, -1.0]), torch.tensor([0.5, -1.0], dtype=torch.bfloat16)),
        (torch.arange(6).view(2, 3).T, torch.arange(6).view(2, 3).T.contiguous()),
        (torch.eye(2), torch.eye(2).to_sparse()),
        (torch.tensor([torch.nan]), -torch.tensor([torch.nan])),
        (Path("/here/a.png"), Path("/there/a.png")),
        # nothing but an address tells these apart
        (object(), object()),
        (lambda: 1, lambda: 2),
    ],
)
def test_what_is_stored_otherwise_is_the_same(one: Any, other: Any) -> None:
    assert of(one) == of(other)


class Drawn(Dataset[Any]):
    """Items that are drawn from every generator there is."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return random.random(), np.random.rand(), torch.rand(2)


def test_nothing_is_drawn_from_the_generators_of_training() -> None:
    found = set()
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[index]
        found.add(fingerprint(Listed(train=[0], test=Drawn())))
        after = random.getstate(), np.random.get_state()[1], torch.get_rng_state()  # type: ignore[index]
        assert before[0] == after[0]
        assert np.array_equal(before[1], after[1])
        assert torch.equal(before[2], after[2])
    # nor does it matter where they stand
    assert len(found) == 1


# the recipes that look at what their examples were made of

IMAGES: dict[str, Any] = {"model": "deit_tiny", "depth": 1, "patch_size": 16, "batch_size": 4}


def of_images(data: Path, **settings: Any) -> str:
    read_cifar.cache_clear()
    list_images.cache_clear()
    return fingerprint(ImageTask(ImageConfig(**{**IMAGES, **settings}), data))


def of_folder(data: Path, **settings: Any) -> str:
    return of_images(data, dataset="folder", image_size=32, **settings)


def test_a_folder_of_images(tmp_path: Path) -> None:
    here = tmp_path / "here"
    write_folder(here, {"train": 6, "val": 2, "test": 2})
    found = of_folder(here)
    assert found.startswith("18+6+6 ")
    # training images are augmented by the seed, which is not what they are
    assert of_folder(here, seed=5) == found
    assert of_folder(shutil.copytree(here, tmp_path / "elsewhere")) == found
    changed = shutil.copytree(here, tmp_path / "changed")
    image = changed / "test" / "n001" / "1.JPEG"
    image.write_bytes((changed / "test" / "n001" / "4.JPEG").read_bytes())
    assert of_folder(changed) != found
    # as many images, one of them of another class now, to train on alone
    mislabelled = shutil.copytree(here, tmp_path / "mislabelled")
    (mislabelled / "train" / "n000" / "0.JPEG").rename(mislabelled / "train" / "n001" / "0.JPEG")
    assert of_folder(mislabelled).startswith("18+6+6 ")
    assert of_folder(mislabelled) != found


_PRINT = """
import sys
from pathlib import Path
from gfsa_experiments.runs.run import fingerprint
from gfsa_experiments.tasks.image import ImageConfig, ImageTask
config = ImageConfig(dataset="folder", image_size=32, model="deit_tiny", depth=1, patch_size=16)
print(fingerprint(ImageTask(config, Path(sys.argv[1]))))
"""


def test_every_process_finds_the_same(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train": 4, "val": 2})
    # sets and dicts of text come in another order there
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", _PRINT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == of_folder(tmp_path)


def of_speech(**parts: list[Any]) -> str:
    batches = {name: SpeechBatches(part, lambda text: [1], 8, 8) for name, part in parts.items()}
    task = SpeechTask.__new__(SpeechTask)
    task.splits = {name: one.split() for name, one in batches.items()}
    return fingerprint(task)


def test_speech_by_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> str:
        read_speech.cache_clear()
        train, test = read_speech("an4", tmp_path, 0.0)[0].values()
        return of_speech(train=train[1:20], test=test)

    path = write_an4(tmp_path)
    first = found()
    # another machine rounds otherwise when it works out features
    with monkeypatch.context() as patch:
        patch.setattr(
            "gfsa_experiments.tasks.speech.data.normalised", lambda features: 1.001 * features
        )
        assert found() == first
    with np.load(path) as file:
        louder = 1.5 * file["feat_test"]
    change_an4(path, feat_test=louder.astype(np.float16))
    assert found() != first
