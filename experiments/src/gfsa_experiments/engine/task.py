"""The interface between a recipe and the training loop: Task, Split, Recipe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from gfsa_experiments.engine.config import TrainConfig


@dataclass
class Split:
    """Examples, and the function that makes a batch of some of them.

    The loop calls ``collate`` with a list of ``dataset[i]``; a dataset with
    ``__getitems__(indices)`` (a hook of torch) may return a whole batch and take
    ``collate=as_it_is``. A batch is a tensor, a dict, list or tuple of tensors, or an object with
    ``.to(device)``.

    Items must depend on the index alone, so that a resumed run sees the same batches. Random
    operations belong in ``Task.prepare`` and ``Task.loss``, or in a dataset wrapped in
    :class:`~gfsa_experiments.engine.batches.SeededItems`.
    """

    dataset: Dataset[Any]
    collate: Callable[[Any], Any]
    lengths: Sequence[int] | None = None
    """Size of each item, for batches of items of similar size."""

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


def as_it_is(batch: Any) -> Any:
    """The collate function of datasets that return whole batches."""
    return batch


class TensorRows(Dataset[Any]):
    """Examples that are rows of tensors; a batch is one indexing operation per tensor."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        # index_select copies whole rows, advanced indexing would copy byte by byte
        at = torch.as_tensor(indices)
        return {name: column.index_select(0, at) for name, column in self.columns.items()}


class Task(ABC):
    """A model, its data, its loss and its metrics: everything that one run trains.

    ``splits["train"]`` is for training, ``splits["valid"]`` for choices (early stopping, options),
    and ``splits["test"]`` is reported and used for no choice. ``valid`` may be missing if the data
    set has no such part and none is held out.
    """

    model: nn.Module
    splits: dict[str, Split]
    metric: str
    """The key of :meth:`score` that is reported, and that early stopping looks at."""
    higher_is_better: bool = True
    tokens: int | None = None
    """Tokens of an example, if rows and logs are to have tokens per second."""
    own_data: OwnData | None = None
    """What was read, if the data is the caller's own: printed, and kept in the run's folder."""
    falling: str | None = None
    """A metric that training lowers: if it ends on ``valid`` no lower than it was before the first
    step, the run counts as diverged."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The training loss, a scalar, the mean over the batch; ``model`` may be a wrapper."""

    @abstractmethod
    def predict(self, model: nn.Module, batch: Any) -> Any:
        """The predictions that :meth:`score` needs: tensors (in dicts, lists or tuples) or text.

        Called without gradients, with the model in eval mode.
        """

    @abstractmethod
    def score(self, predictions: list[Any]) -> dict[str, float]:
        """Metrics of a split, from the predictions of its batches in order, on the CPU."""

    def prepare(self, batch: Any) -> Any:
        """A training batch after random augmentation, on the device.

        torch's global generators are seeded for it by run, step and process.
        """
        return batch

    def example(self) -> Any:
        """Inputs of ``gfsa.diagnose(model, inputs)`` for the lens page. None for no page."""
        return None

    def probes(self, model: nn.Module) -> dict[str, Any] | None:
        """More measurements of the trained model, as plain data for ``probes.json``."""
        return None

    def identity(self, split: str, index: int) -> Any:
        """The content of an example that the data's fingerprint is computed from.

        Numbers, text, bytes or tensors, in dicts, lists, tuples or dataclasses; the same for every
        seed and machine. If items are computed with rounding that depends on the machine, return
        the input of that computation. The default is the item itself, and None for ``train``,
        whose items may be augmented: only its size counts.
        """
        if split == "train":
            return None
        dataset = self.splits[split].dataset
        items = _items(self.splits[split], [index])
        return items if hasattr(dataset, "__getitems__") else items[0]

    def first_examples(self, count: int) -> Any:
        """A batch of the first examples of ``valid``, or of ``test`` if there is no ``valid``."""
        split = self.splits["valid" if "valid" in self.splits else "test"]
        return split.collate(_items(split, list(range(min(count, len(split))))))


def _items(split: Split, rows: list[int]) -> Any:
    """What ``collate`` takes: a whole batch, or a list of examples."""
    fetch = getattr(split.dataset, "__getitems__", None)
    return fetch(rows) if fetch else [split.dataset[row] for row in rows]


@dataclass(frozen=True)
class OwnData:
    """What a run learned about the caller's own data; the run's folder keeps it."""

    name: str
    source: str
    """Its path, or its name on the hub."""
    splits: dict[str, int]
    """The size of each part."""
    split_by: str
    """How the parts were made."""
    labels: str = ""
    """What the labels were taken for and why; empty if there are none."""
    unit: str = "examples"
    digest: str = ""
    """A hash of everything that was read, where that is cheap; part of the fingerprint."""
    repeated: str = ""
    """How much of valid and test is trained on; empty if nothing is, or it is not known."""

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {part}" for part, count in self.splits.items())
        labels = f"; labels: {self.labels}" if self.labels else ""
        repeated = f"; {self.repeated}" if self.repeated else ""
        return f"{self.name}: {counts} {self.unit} ({self.split_by}){repeated}{labels}"


@dataclass(frozen=True)
class Recipe:
    """A named experiment: its settings and how its task is built."""

    name: str
    title: str
    config: type[TrainConfig]
    build: Callable[[Any, Path], Task]
    """``build(config, data_dir)``: read the data and make the model; the caller seeds it."""
    extra: str = "text"
    """The extra of gfsa-experiments that installs the packages it needs."""


@contextmanager
def sealed(split: Split) -> Iterator[None]:
    """Inside, whoever reads the examples of ``split`` gets an error.

    The data set itself is sealed, not only its place among the splits: a task may have it by other
    names. Copies of the examples that a task has made are not found.
    """
    dataset = split.dataset
    kind = type(dataset)
    try:
        # one base and no slots, so its layout in memory is that of the class it replaces
        dataset.__class__ = type(f"Sealed{kind.__name__}", (kind,), dict(_NOTHING_TO_READ))
    except TypeError:
        # lists and the like keep their class
        split.dataset = type("Sealed", (), dict(_NOTHING_TO_READ))()
    try:
        yield
    finally:
        if split.dataset is dataset:
            object.__setattr__(dataset, "__class__", kind)
        split.dataset = dataset


def _refuse(*given: Any) -> NoReturn:
    raise RuntimeError(
        "the test split was read before the last step: it is reported, and nothing may be trained "
        "on it or chosen by it; read train or valid"
    )


def _attribute(self: Any, name: str) -> Any:
    # isinstance asks for it
    return type(self) if name == "__class__" else _refuse()


_NOTHING_TO_READ = {
    "__slots__": (),
    "__getattribute__": _attribute,
    # looked up on the class, past __getattribute__
    **dict.fromkeys(("__len__", "__getitem__", "__iter__"), _refuse),
}
