"""What a recipe hands to the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from gfsa.recipes.config import TrainConfig
    from gfsa.recipes.speed import Work


@dataclass
class Split:
    """Examples, and how some of them become a batch.

    The loop hands ``collate`` a list of ``dataset[i]``; a dataset with ``__getitems__(indices)``
    (torch's own hook) may cut out a whole batch at once and take ``collate=as_it_is``.
    A batch is a tensor, a dict, list or tuple of them, or anything with ``.to(device)``.

    Items must not depend on anything but the index: what is random belongs into ``Task.loss``, on
    the device, or into a :class:`~gfsa.recipes.batches.SeededItems` around the dataset, so that an
    interrupted run goes on with the very same batches.
    """

    dataset: Dataset[Any]
    collate: Callable[[Any], Any]
    lengths: Sequence[int] | None = None
    """Size of each item, if batches are to be made of items of like size."""

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


def as_it_is(batch: Any) -> Any:
    """The collate function of datasets that cut out batches themselves."""
    return batch


class Task(ABC):
    """A model, its data, its loss and its measure: what one run trains.

    ``splits["train"]`` is learned from, ``splits["valid"]`` may choose (early stopping, options),
    and ``splits["test"]`` is reported and chooses nothing. ``valid`` may be missing where a data
    set has no such part and none was split off.
    """

    model: nn.Module
    splits: dict[str, Split]
    metric: str
    """The key of :meth:`score` that is reported and stopped on."""
    higher_is_better: bool = True
    work: Work | None = None
    """What an example takes, if rows and logs are to have tokens a second and MFU."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The training loss, a scalar that is a mean over the batch; ``model`` may be wrapped."""

    @abstractmethod
    def predict(self, model: nn.Module, batch: Any) -> Any:
        """What :meth:`score` needs of one batch: tensors (in any dict, list or tuple) or text.

        Called without gradients, the model in eval mode.
        """

    @abstractmethod
    def score(self, predictions: list[Any]) -> dict[str, float]:
        """Metrics over all batches of a split, tensors on the CPU by now, in order."""

    def prepare(self, batch: Any) -> Any:
        """Whatever is random in a training batch, on the device (augmentation, mixing).

        torch's global generators are seeded for it by run, step and process.
        """
        return batch

    def example(self) -> Any:
        """Inputs for the lens: what ``gfsa.diagnose(model, inputs)`` takes. None for no page."""
        return None

    def identity(self, split: str, index: int) -> Any:
        """What tells an example from those of other data; :mod:`~gfsa.recipes.fingerprint` asks.

        Numbers, text, bytes or tensors, in any dict, list, tuple or dataclass; the same in every
        run on this data, whatever seed and machine. So where items are worked out (a spectrum,
        eigenvectors), which machines round differently, it is better what they were worked out
        from. By default the item itself, and of ``train``, whose items may be augmented, nothing:
        its size counts alone.
        """
        if split == "train":
            return None
        dataset = self.splits[split].dataset
        fetch = getattr(dataset, "__getitems__", None)
        return dataset[index] if fetch is None else fetch([index])


@dataclass(frozen=True)
class DataSource:
    """A data set that a recipe can read, for ``gfsa train --list`` and for errors."""

    name: str
    files: str
    """The files it consists of, as looked for under ``--data-dir``."""
    where: str
    """Where to get them."""


@dataclass(frozen=True)
class Recipe:
    """An experiment by name."""

    name: str
    title: str
    config: type[TrainConfig]
    build: Callable[[Any, Path], Task]
    """``build(config, data_dir)``: read the data and make a model, seeded by ``config.seed``."""
    sources: tuple[DataSource, ...] = field(default=())
    extra: str = "train"
    """The extra of the package that installs what it imports."""
    label: Callable[[Any, Path], str] | None = None
    """``label(config, data_dir)``, for data that goes by its folder's name."""

    def label_of(self, config: TrainConfig, data_dir: Path) -> str:
        """What tables call a run's task: the config's label, unless the recipe knows more."""
        return config.label() if self.label is None else self.label(config, data_dir)
