"""A model of the catalogue, with inputs that it takes and the rounding that it has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from census.catalogue import Entry, randomise
from census.differences import difference, gradient_differences, loss_of
from census.inputs import Batch, attempts, batch_for
from census.reference import NoReferenceError, Observation, Observer
from census.shrink import HEADS
from census.verdict import one_line

SHAPES = ((1, 7), (2, 10), (HEADS, 7))
"""(samples, length) of the forwards, in this order."""
OBSERVED = 3
"""Samples of the observed forwards: not the number of heads of any tiny model."""
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
MOST_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-2}
SINGLE_ROUNDING = 1e-5
MOST_PARAMETERS = {"transformers": 12_000_000, "timm": 32_000_000}
"""A model of transformers above this has a part whose config was not made small."""


class NotRunnableError(Exception):
    """No inputs were found that the model accepts."""


class Subject:
    """One model of the catalogue with inputs that it accepts."""

    def __init__(self, entry: Entry, dtype: torch.dtype = torch.float64) -> None:
        self.entry = entry
        self.dtype = dtype
        self.rounding = ROUNDING[dtype]
        self.single = False
        """Whether a softmax of the model computes in float32 whatever the model's dtype."""
        size = entry.parameters()
        if size > MOST_PARAMETERS[entry.library]:
            raise ValueError(f"no tiny config is known: {size / 1e6:.0f} million parameters")
        self.model = self.build()
        self.sources = self._sources()

    @property
    def caches(self) -> bool:
        return "use_cache" in inspect.signature(self.model.forward).parameters

    def build(self) -> nn.Module:
        """The model in float64 with weights that are the same each time."""
        torch.manual_seed(0)
        return randomise(self.entry.build().eval()).to(self.dtype)

    def batch(self, samples: int, length: int, seed: int = 1) -> Batch:
        batch = batch_for(self.model, self.sources, samples, length, seed)
        return {
            name: x.to(self.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in batch.items()
        }

    def _sources(self) -> tuple[str, ...]:
        errors = []
        for sources in attempts(self.model):
            self.sources = sources
            try:
                with torch.no_grad():
                    batch = self.batch(*SHAPES[1])
                    outputs = run(self.model, batch)
                    if self.caches:
                        run(self.model, {**batch, "use_cache": False})
            except TimeoutError:
                raise
            except Exception as error:
                errors.append(f"{'+'.join(sources)}: {one_line(error)}")
                continue
            if not outputs:
                errors.append(f"{'+'.join(sources)}: no tensor comes out")
            elif not all(bool(y.isfinite().any()) for y in outputs):
                errors.append(f"{'+'.join(sources)}: its outputs are NaN")
            else:
                return sources
        raise NotRunnableError(
            "; ".join(errors[:2]) or "no known input in the signature of its forward"
        )

    def uncached(self, samples: int, length: int, seed: int = 1) -> Batch:
        """A batch for a forward without a cache, which decoders fill unless told otherwise."""
        batch = self.batch(samples, length, seed)
        return {**batch, "use_cache": False} if self.caches else batch

    @functools.cached_property
    def observations(self) -> list[dict[str, Observation]]:
        """The square maps of the model: as it is, with sample 0 and with a corner exchanged."""
        length = SHAPES[0][1]
        batch, other = (self.uncached(OBSERVED, length, seed) for seed in (1, 2))
        variants = [
            batch,
            {name: _exchanged(x, other[name], slice(1), ...) for name, x in batch.items()},
            {name: _exchanged(x, other[name], *_corner(x)) for name, x in batch.items()},
        ]
        found = []
        for inputs in variants:
            observer = Observer(self.model)
            with torch.no_grad(), observer.running():
                run(self.model, inputs)
            found.append(observer.seen)
            self.single = self.single or observer.single
        return found

    @functools.cached_property
    def shaken(self) -> nn.Module:
        """The model with weights that differ in their last digits."""
        model = self.build()
        size = 1e-13 if self.dtype == torch.float64 else 1e-7
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.mul_((1 + size * noise).to(p.dtype))
        return model

    @functools.cached_property
    def gradient_tolerance(self) -> float:
        """The same for gradients."""
        found = []
        for model in (self.model, self.shaken):
            model.zero_grad(set_to_none=True)
            outputs = run(model, self.uncached(*SHAPES[1]))
            if not any(y.requires_grad for y in outputs):
                return self.rounding
            loss_of(outputs).backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
            model.zero_grad(set_to_none=True)
        moved = max(gradient_differences(*found).values(), default=0.0)
        tolerance = max(self.rounding, 100 * moved)
        if tolerance > MOST_ROUNDING[self.dtype]:
            raise NoReferenceError(f"rounding alone moves the gradients by {moved:.1e}")
        return tolerance

    def tolerance(self, batch: Batch) -> float:
        """How far rounding alone may move the outputs, relative to their size.

        Parts of a model may compute in float32, or choose experts by a threshold.
        """
        with torch.no_grad():
            moved = difference(run(self.shaken, batch), run(self.model, batch))
        tolerance = max(self.rounding, 100 * moved)
        if tolerance > MOST_ROUNDING[self.dtype]:
            raise NoReferenceError(f"rounding alone moves the outputs by {moved:.1e}")
        return tolerance


def run(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Every floating tensor that comes out, in order."""
    # some models sample while they run
    torch.manual_seed(0)
    if set(batch) == {"x"}:
        return list(_tensors(model(batch["x"])))
    return list(_tensors(model(**batch)))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, Mapping):
        for name, inner in output.items():
            if name != "past_key_values":
                yield from _tensors(inner)
    elif isinstance(output, list | tuple):
        for inner in output:
            yield from _tensors(inner)


def _exchanged(x: Any, other: Any, *where: Any) -> Any:
    if not isinstance(x, Tensor) or not x.dim():
        return x
    x = x.clone()
    x[where] = other[where]
    return x


def _corner(x: Any) -> tuple[Any, ...]:
    """The first token, or the upper left quarter of an image."""
    if not isinstance(x, Tensor) or x.dim() < 4:
        return (slice(None), slice(1)) if isinstance(x, Tensor) and x.dim() > 1 else (slice(0),)
    return (..., slice(x.shape[-2] // 2), slice(x.shape[-1] // 2))
