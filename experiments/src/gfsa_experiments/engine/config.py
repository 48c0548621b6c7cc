"""Typed settings of a training run: their defaults and bounds, and their form as text."""

from __future__ import annotations

import dataclasses
import difflib
import fractions
import functools
import math
import os
import re
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pandas import Interval

if TYPE_CHECKING:
    from torch import nn

Precision = Literal["fp32", "tf32", "bf16"]
Schedule = Literal["linear", "cosine", "constant"]
Compile = Literal["no", "model", "blocks", "auto"]

AnyConfig = TypeVar("AnyConfig")


# the bounds of a setting stand in its type
Count = Annotated[int, Interval(1, math.inf, "left")]
CountOrZero = Annotated[int, Interval(0, math.inf, "left")]
Positive = Annotated[float, Interval(0, math.inf, "neither")]
NotNegative = Annotated[float, Interval(0, math.inf, "left")]
Share = Annotated[float, Interval(0, 1, "both")]
ShareBelowOne = Annotated[float, Interval(0, 1, "left")]
Fraction = Annotated[float, Interval(0, 1, "right")]
# above the upper bound the steps of a run cannot be counted
Epochs = Annotated[float, Interval(0, 1e9, "right")]


# a plan of hundreds of runs asks for the bounds of a few classes thousands of times
@functools.cache
def _bounds_in(kind: type) -> list[tuple[str, Interval]]:
    """The bounds in the types of a class's fields, also in unions with None.

    Those of base classes count too: a subclass that gives a field another default may repeat its
    plain type.
    """
    return [
        (name, bounds)
        for base in filter(dataclasses.is_dataclass, kind.__mro__)
        for name, hint in typing.get_type_hints(base, include_extras=True).items()
        for option in (hint, *typing.get_args(hint))
        for bounds in getattr(option, "__metadata__", ())
        if isinstance(bounds, Interval)
    ]


def check_bounds(config: Any) -> None:
    """Raise ValueError if a field of a config is outside the bounds in its type; None is inside."""
    kind: type = type(config)
    for name, bounds in _bounds_in(kind):
        value = getattr(config, name)
        # NaN and infinity are in no interval
        if value is not None and value not in bounds:
            raise ValueError(f"{name} must lie in {bounds}, got {value}")


def check_multiple(config: Any, whole: str, part: str) -> None:
    """Raise ValueError unless the setting ``whole`` is a multiple of the setting ``part``."""
    total, size = getattr(config, whole), getattr(config, part)
    if total % size:
        raise ValueError(f"{whole} {total} must be a multiple of {part} {size}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of every recipe; a recipe subclasses it, with the paper's values as defaults."""

    in_label: ClassVar[tuple[str, ...]] = ()
    """Settings that :meth:`label` shows already."""
    short_names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Settings by the names that the command line and rows have for them: ``("label",
    "label_column")``, since ``label`` is a method."""

    used_if: ClassVar[tuple[tuple[str, str], ...]] = (("schedule=linear,cosine", "min_lr"),)
    """Conditions, and the settings that have no effect without: ``encoder=branchformer``, one of
    several values as in ``tokens=unigram,bpe``, ``time_masks`` (set, and not 0), ``!data`` (not
    set)."""

    seed: CountOrZero = 0
    epochs: Epochs = 5
    """Passes over the training data; a fraction stops within a pass."""
    max_steps: CountOrZero = 0
    """If above 0, stop after that many optimiser steps instead of after ``epochs``. ``epochs`` on
    the command line override a recipe's default ``max_steps``."""
    batch_size: Count = 32
    """Examples per optimiser step, over all processes."""
    eval_batch_size: CountOrZero = 0
    """0: as ``batch_size``."""
    lr: Positive = 5e-5
    gain_lr: NotNegative | None = None
    """The learning rate of what is not decayed (gains, biases); None: ``lr``."""
    weight_decay: NotNegative = 0.0
    beta2: ShareBelowOne = 0.999
    schedule: Schedule = "linear"
    warmup: ShareBelowOne = 0.0
    """Share of all steps over which the learning rate rises."""
    min_lr: NotNegative = 0.0
    """Where the schedule ends, as a share of ``lr``."""
    clip: NotNegative = 1.0
    """Largest norm of the gradient; 0 for no clipping."""
    precision: Precision = "fp32"
    """``tf32``: float32, with matrix products that tensor cores round to 19 bits."""
    ema: ShareBelowOne = 0.0
    """Decay of a moving average of the weights, which is evaluated instead of them; 0 for none."""
    group_by_length: bool = False
    """Batches of examples of similar length (in random order)."""
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch (always so with several processes)."""
    workers: CountOrZero = 0
    """Processes that read data."""
    eval_every: Positive = 1.0
    """Epochs between evaluations of ``valid``."""
    patience: CountOrZero = 0
    """Evaluations without improvement of ``valid`` before stopping, at the best weights (as
    ``best``); 0 never stops early."""
    best: bool = False
    """Report the weights that were best on ``valid`` rather than the last ones."""
    log_every: Count = 50
    """Steps between lines of the log."""
    compile: Compile = "no"
    """torch.compile the ``model``, or its repeated ``blocks``, which compiles faster; ``auto``: the
    blocks on a GPU, nothing on a CPU."""
    graphs: bool = False
    """Replay whole training steps as CUDA graphs: small models are bound by launches."""
    tensorboard: bool = True
    checkpoint_every: CountOrZero = 0
    """Steps between checkpoints; 0: at evaluations and at the end of each epoch."""
    checkpoints: bool = True
    """Write checkpoints; without them an interrupted run starts again from step 0."""
    lens: bool = False
    """Write a lens page of the trained model."""
    save_model: bool = False
    """Keep the trained weights (the filters are always kept)."""

    def check(self) -> None:
        """Raise ValueError for settings that make no sense; subclasses add their own checks."""
        check_bounds(self)

    def total_steps(self, per_epoch: int) -> int:
        """Optimiser steps of the whole run: ``max_steps``, or ⌈epochs · steps of an epoch⌉."""
        # as it was written: 1.1 · 10 in floats is above 11
        return self.max_steps or math.ceil(fractions.Fraction(str(self.epochs)) * per_epoch)

    def steps_between_evaluations(self, per_epoch: int, total: int) -> int:
        """Optimiser steps from one evaluation of ``valid`` to the next."""
        return max(1, round(self.eval_every * per_epoch))

    def unused(self) -> dict[str, str]:
        """Settings that have no effect given the others: name → why, and what would use it.

        ``gfsa train`` refuses them. Subclasses add their own.
        """
        unused: dict[str, str] = {}
        for kind in type(self).__mro__:
            for condition, names in vars(kind).get("used_if", ()):
                setting, _, wanted = condition.removeprefix("!").partition("=")
                value = getattr(self, setting)
                holds = str(value) in wanted.split(",") if wanted else bool(value)
                if holds == condition.startswith("!"):
                    why = f"{setting}={value} has no use for it"
                    why = f"it needs {setting}=" if value == "" else why
                    has = f", {wanted.replace(',', ' or ')} has" if wanted else ""
                    unused = dict.fromkeys(names.split(), why + has) | unused
        if self.patience:
            unused["best"] = f"patience={self.patience} reports the best weights by itself"
        return unused

    def advice(self, filter_lr: float | None) -> str:
        """A sentence to whoever starts a run with these settings, whose method has this rate."""
        return ""

    def sketch(self) -> nn.Module | None:
        """The model on the device ``meta``, to try a method on; None if it depends on the data.

        Raises ValueError if there is no such model.
        """
        return None

    def label(self) -> str:
        """The name of the task in tables: the data set, or the data set and the model."""
        raise NotImplementedError

    def usual(self) -> TrainConfig:
        """The recipe's defaults, which :func:`changed_settings` compares with."""
        return type(self)()


# settings that change neither what is learned nor how fast
HARMLESS = {"seed", "workers", "eval_batch_size", "log_every", "checkpoint_every", "checkpoints"}
HARMLESS |= {"lens", "probes", "save_model", "tensorboard"}


def settings_of(config: TrainConfig) -> str:
    """The settings that differ from the recipe's defaults: ``epochs=2 lr=0.001``.

    The label shows others whole; of a path it shows the last part, unended.
    """
    changed = changed_settings(config)
    for name in changed.keys() & set(config.in_label):
        value = str(changed[name])
        ended = name == "data" and re.search(r".\.[A-Za-z]\w*$", value)
        if "/" not in value and not ended:
            del changed[name]
    return as_text(changed)


# an absolute path, also one of Windows, or one from the home folder or the folder above
_OUTSIDE = re.compile(r"[/\\~]|[A-Za-z]:[/\\]|\.\.([/\\]|$)")


def _without_folders(values: dict[str, Any]) -> dict[str, Any]:
    """The settings with the last part alone of a path outside of the working folder.

    A row is published and compared with rows of other machines: ``/home/me/my.csv`` is ``my.csv``
    there. Which ``my.csv`` it was, the fingerprint of the data says.
    """
    return {
        # not Path.expanduser, which raises for a user that the machine does not know
        name: os.path.basename(os.path.abspath(os.path.expanduser(value))) or value
        if isinstance(value, str) and _OUTSIDE.match(value)
        else value
        for name, value in values.items()
    }


def changed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that differ from the recipe's defaults, as a row has them."""
    usual, short = vars(config.usual()), {full: short for short, full in config.short_names}
    changed = {k: v for k, v in vars(config).items() if k not in HARMLESS and v != usual[k]}
    return _without_folders({short.get(name, name): value for name, value in changed.items()})


def as_text(values: dict[str, Any]) -> str:
    """``K=4 learn=w0,w1``"""
    return " ".join(
        f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in values.items()
    )


def from_text(kind: type[AnyConfig], settings: dict[str, str]) -> AnyConfig:
    """A config with some fields parsed from text; the others have their defaults."""
    hints = typing.get_type_hints(kind)
    names = field_names(kind)
    given: dict[str, Any] = {}
    for name, text in settings.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=3)
            raise ValueError(
                f"{kind.__name__} has no setting {name!r}"
                + (f"; did you mean {', '.join(close)}?" if close else ".")
                + f" It has: {', '.join(names)}"
            )
        given[name] = parse(name, text, hints[name])
    return kind(**given)


def field_names(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def parse(name: str, text: str, kind: Any) -> Any:
    """``text`` as a value of ``kind``: bool, int, float, str, Literal or tuple, optional or not."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        (kind,) = [option for option in typing.get_args(kind) if option is not type(None)]
        return parse(name, text, kind)
    if origin is Literal:
        choices = typing.get_args(kind)
        for choice in choices:
            if text == str(choice):
                return choice
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {text!r}")
    if origin is tuple:
        inner = typing.get_args(kind)[0]
        return tuple(parse(name, part.strip(), inner) for part in text.split(",") if part.strip())
    if kind is bool:
        if text.lower() in ("true", "yes", "1"):
            return True
        if text.lower() in ("false", "no", "0"):
            return False
        raise ValueError(f"{name} must be true or false, got {text!r}")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} must be of type {kind.__name__}, got {text!r}") from None
