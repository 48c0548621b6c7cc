"""Keep a task from its test set until training is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from gfsa_experiments.engine.task import Split


@contextmanager
def sealed(split: Split) -> Iterator[None]:
    """Inside, whoever reads the examples of ``split`` gets an error.

    The data set itself is sealed, not only its place among the splits: a task may have it by other
    names. Copies of the examples that a task has made are not found.
    """
    dataset = split.dataset
    kind = type(dataset)
    try:
        # one base and no slots: the layout in memory is that of the class it takes the place of
        dataset.__class__ = type(f"Sealed{kind.__name__}", (kind,), dict(_NOTHING_TO_READ))
        is_swapped = True
    except TypeError:
        # lists and the like keep their class
        split.dataset = type("Sealed", (), dict(_NOTHING_TO_READ))()
        is_swapped = False
    try:
        yield
    finally:
        if is_swapped:
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
