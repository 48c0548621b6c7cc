"""Typed settings: dataclasses that can be printed, overridden from the command line and checked."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    from torch import nn

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Schedule = Literal["linear", "cosine", "constant", "wsd"]
Compile = Literal["no", "model", "blocks", "auto"]

AnyConfig = TypeVar("AnyConfig")

# more than anybody trains; beyond it steps cannot be counted
_MOST_EPOCHS = 1e9


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What every recipe has; a recipe subclasses it, with the paper's settings as defaults."""

    in_label: ClassVar[tuple[str, ...]] = ()
    """Settings that :meth:`label` tells already."""

    seed: int = 0
    epochs: float = 5
    """Passes over the training data; a fraction stops within one."""
    max_steps: int = 0
    """If above 0, stop after that many optimiser steps instead; ``epochs`` that are given on the
    command line go before a recipe's own."""
    batch_size: int = 32
    """Examples per optimiser step, over all processes and accumulated batches."""
    eval_batch_size: int = 0
    """0: as ``batch_size``."""
    accumulate: int = 1
    """Batches per optimiser step, for models that do not fit otherwise."""
    lr: float = 5e-5
    weight_decay: float = 0.0
    beta2: float = 0.999
    schedule: Schedule = "linear"
    """``wsd``: warm up, stay, and fall linearly over the last ``decay`` of the steps."""
    decay: float = 0.2
    """Share of all steps over which ``wsd`` falls."""
    warmup: float = 0.0
    """Share of all steps over which the learning rate rises."""
    min_lr: float = 0.0
    """Where the schedule ends, as a share of ``lr``."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 for none."""
    precision: Precision = "fp32"
    """``tf32`` keeps 32 bits, but lets tensor cores round what they multiply to 19 of them."""
    ema: float = 0.0
    """Decay of an average of the weights that is evaluated in their stead; 0 for none."""
    group_by_length: bool = False
    """Batches of examples of like length (in random order)."""
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch (always so with several processes)."""
    workers: int = 0
    """Processes that read data."""
    eval_every: float = 1.0
    """Epochs between evaluations of ``valid``."""
    patience: int = 0
    """Evaluations without improvement of ``valid`` before stopping, at the best weights (as
    ``best``); 0 never stops early."""
    best: bool = False
    """Report the weights that were best on ``valid`` rather than the last ones."""
    log_every: int = 50
    """Steps between lines of the log."""
    compile: Compile = "no"
    """torch.compile the ``model``, or the ``blocks`` it is a stack of, which takes less time;
    ``auto``: the blocks on a GPU, nothing on a CPU."""
    graphs: bool = False
    """Replay whole training steps as CUDA graphs: small models are bound by launches."""
    deterministic: bool = False
    """Refuse operations that differ from run to run on a GPU."""
    tensorboard: bool = True
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: at the end of each epoch."""
    checkpoints: bool = True
    """Write checkpoints; without them an interrupted run begins anew."""
    lens: bool = False
    """Write a lens page of the trained model."""
    save_model: bool = False
    """Keep the trained weights (the filters are always kept)."""

    def check(self) -> None:
        """Raise ValueError for settings that make no sense; subclasses add their own."""
        positive = ("epochs", "batch_size", "accumulate", "lr", "eval_every", "log_every")
        for name in positive:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be above 0 and finite, got {value}")
        if self.epochs > _MOST_EPOCHS:
            raise ValueError(f"epochs must be at most {_MOST_EPOCHS:g}, got {self.epochs:g}")
        at_least_zero = ("max_steps", "eval_batch_size", "weight_decay", "clip", "workers")
        for name in (*at_least_zero, "patience", "checkpoint_every", "min_lr", "seed"):
            value = getattr(self, name)
            # no number is not below 0 either
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay}")
        for name in ("warmup", "ema", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} cannot be split into accumulate={self.accumulate} "
                "equal batches"
            )
        if self.graphs and (self.accumulate > 1 or self.precision == "fp16"):
            raise ValueError("graphs=true captures one batch a step in fp32, tf32 or bf16")

    def steps_between_evaluations(self, per_epoch: int, total: int) -> int:
        """Optimiser steps from one evaluation of ``valid`` to the next.

        Args:
            per_epoch: steps of an epoch.
            total: steps of the whole run.
        """
        return max(1, round(self.eval_every * per_epoch))

    def unused(self) -> dict[str, str]:
        """Settings that change nothing beside the present ones: name → what would use it.

        Whoever gives one of them means something that will not happen, and would get rows that
        look like another experiment's: ``gfsa train`` refuses it. Subclasses add their own.
        """
        unused: dict[str, str] = {}
        if self.schedule == "constant":
            unused["min_lr"] = "schedule=constant never falls; linear, cosine and wsd do"
        if self.schedule != "wsd":
            unused["decay"] = f"schedule={self.schedule} has no such phase; wsd has"
        if self.patience:
            unused["best"] = f"patience={self.patience} reports the best weights by itself"
        if self.accumulate > 1:
            unused["drop_last"] = "accumulate above 1 always leaves the last batch out"
        return unused

    def sketch(self) -> nn.Module | None:
        """The model without its numbers (on the device ``meta``), for trying a method on it.

        None where it takes data, or a package that is not there, to know what the model is.

        Raises:
            ValueError: if there is no such model.
        """
        return None

    def label(self) -> str:
        """What is trained, for tables: the data set, or the data set and the model."""
        raise NotImplementedError

    def usual(self) -> TrainConfig:
        """The recipe's defaults, for telling what was changed."""
        return type(self)()


# these change neither what is learned nor how fast
HARMLESS = (
    "seed",
    "workers",
    "log_every",
    "checkpoint_every",
    "checkpoints",
    "lens",
    "save_model",
    "tensorboard",
    "eval_batch_size",
)


def settings_of(config: TrainConfig) -> str:
    """What makes this experiment another than the recipe's: ``epochs=2 lr=0.001``."""
    changed = changed_settings(config)
    return as_text({k: v for k, v in changed.items() if not _told(config, k, v)})


def _told(config: TrainConfig, name: str, value: Any) -> bool:
    """Whether the label says it all; of a path it has the last part only."""
    return name in config.in_label and "/" not in str(value)


def changed_settings(config: TrainConfig) -> dict[str, Any]:
    """Settings that matter and are not the recipe's defaults."""
    defaults = config.usual()
    return {
        name: getattr(config, name)
        for name in field_names(config)
        if name not in HARMLESS and getattr(config, name) != getattr(defaults, name)
    }


def as_text(values: dict[str, Any]) -> str:
    """``K=4 learn=w0,w1``"""
    return " ".join(
        f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in values.items()
    )


def from_text(kind: type[AnyConfig], settings: dict[str, str]) -> AnyConfig:
    """A config with some fields given as text, on the command line; the others as they are."""
    hints = get_type_hints(kind)
    names = field_names(kind)
    given: dict[str, Any] = {}
    for name, text in settings.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=3)
            raise ValueError(
                f"{kind.__name__} has no setting {name!r}"
                + (f"; did you mean {', '.join(close)}?" if close else "")
                + f" It has: {', '.join(names)}"
            )
        given[name] = parse(name, text, hints[name])
    return kind(**given)


def field_names(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def parse(name: str, text: str, kind: Any) -> Any:
    """``text`` as a value of ``kind``: bool, int, float, str, Literal, tuple or an optional."""
    origin = get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        (kind,) = [one for one in get_args(kind) if one is not type(None)]
        return parse(name, text, kind)
    if origin is Literal:
        choices = get_args(kind)
        for choice in choices:
            if text == str(choice):
                return choice
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {text!r}")
    if origin is tuple:
        inner = get_args(kind)[0]
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
