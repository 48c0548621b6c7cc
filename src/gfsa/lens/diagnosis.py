"""``gfsa.diagnose``: run a model on some data and measure every layer."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.lens.readings import ModelReading, printable
from gfsa.lens.record import LensOptions, Recorder, no_nested_tensors, plugged_everywhere
from gfsa.lens.report import LensReport
from gfsa.lens.tokens import AXES_IN_DOUBT, axes_in_doubt
from gfsa.plugs.registry import Unknown
from gfsa.plugs.running import call, evaluating
from gfsa.plugs.sites import Layers, Site

Forward = Callable[[nn.Module, Any], Any]
"""Calls a model on a batch."""


def diagnose(
    model: nn.Module | Mapping[str, nn.Module],
    inputs: Any,
    layers: Layers = "all",
    features: bool = True,
    attention: bool = True,
    spectral: bool = True,
    valid: Tensor | Callable[[Any], Tensor | None] | None = None,
    forward: Forward | None = None,
    max_batches: int | None = None,
    spectral_samples: int = 8,
    most_frequencies: int = 33,
    most_tokens: int = 1024,
    unknown: Unknown = "refuse",
    progress: bool | Progress | None = None,
) -> LensReport:
    """Measure whether a model over-smooths, where, and what its filters change.

    The model runs in evaluation mode without gradients, and is unchanged afterwards: attention
    layers without a filter get one that is ordinary attention while it runs.

    Args:
        model: any model that :func:`gfsa.plug` knows, plugged or not; or several by name, to
            compare them on the same inputs.
        inputs: one batch (a tensor, a dict for keyword arguments, a tuple for positional ones), or
            an iterable of batches such as a DataLoader. A batch that is a pair whose second part
            is a vector of integers, as from loaders of labelled data, is read as (input, labels).
        layers: which attention layers to measure, as in :func:`gfsa.plug`.
        features: measure the tokens that leave each block.
        attention: measure entropy and Dirichlet energy of each head: about three more attention
            passes per layer.
        spectral: measure frequency responses and singular values of the maps: the costly part,
            O(n³) per head and sample for the singular values.
        valid: ``(B, N)``, True (or 1) where a token counts, or a function of the batch that returns
            it. Default: tokens that the layer's attention does not hide from every query, and that
            the ``attention_mask`` (or key padding mask) of the model, or of its encoder, decoder or
            tower around the layer, does not hide.
        forward: ``(model, batch)``: calls the model, if not as above.
        max_batches: stop after this many batches.
        spectral_samples: samples that take part in the spectral measurements.
        most_frequencies: Fourier modes in a response, at most.
        most_tokens: no n×n map is built beyond this length, so no singular values of maps.
        unknown: attention that no adapter knows is skipped (``"refuse"``) or traced
            (``"trace"``), as in :func:`gfsa.plug`.
        progress: True or False for a progress bar (default: in a terminal), or a function that is
            called with (batches done, number of batches or None).

    Returns:
        A report with the readings of each model by its name. A single model has the name of its
        class.

    Raises:
        TypeError: if ``model`` is neither an ``nn.Module`` nor a mapping of them.
        ValueError: if the mapping is empty, ``inputs`` has no batch, or ``layers`` selects no
            layer.

    Examples:
        >>> report = gfsa.diagnose(model, torch.randn(4, 10, 16))
        >>> list(report.models)
        ['TransformerEncoder']
        >>> cosine = report.models["TransformerEncoder"].features[-1].cosine
    """
    given = model if isinstance(model, Mapping) else {type(model).__name__: model}
    models = {printable(str(name)): module for name, module in given.items()}
    if not models:
        raise ValueError("expected a model, or several models by name, got an empty mapping")
    for name, module in models.items():
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected an nn.Module, got {type(module).__name__} for {name!r}")
    options = LensOptions(
        features, attention, spectral, spectral_samples, most_frequencies, most_tokens
    )
    is_one = isinstance(inputs, (Tensor, Mapping, tuple)) or not isinstance(inputs, Iterable)
    batches = [inputs] if is_one else inputs
    if len(models) > 1 and isinstance(batches, Iterator):
        # a generator can be iterated only once
        batches = list(batches)
    known = length_hint(batches, -1)
    total = None if known < 0 else min(known, known if max_batches is None else max_batches)
    readings = {}
    for name, module in models.items():
        chosen = itertools.islice(batches, max_batches)
        with progress_bar(progress, name, total) as advance:
            readings[name] = _measure(
                name,
                module,
                chosen if is_one else map(_without_labels, chosen),
                advance,
                layers=layers,
                options=options,
                valid=valid,
                forward=forward or _call,
                unknown=unknown,
            )
    return LensReport(readings, created=datetime.now(timezone.utc).isoformat(timespec="seconds"))


def _measure(
    name: str,
    model: nn.Module,
    batches: Iterable[Any],
    advance: Callable[[], None],
    *,
    layers: Layers,
    options: LensOptions,
    valid: Tensor | Callable[[Any], Tensor | None] | None,
    forward: Forward,
    unknown: Unknown,
) -> ModelReading:
    """The readings of one model; ``advance`` is called after each batch."""
    # a compiled model would be compiled again for every hook; the module inside is not compiled
    model = getattr(model, "_orig_mod", model)
    parameters = sum(p.numel() for p in model.parameters())
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    start = time.perf_counter()
    with (
        evaluating(model),
        torch.no_grad(),
        no_nested_tensors(model),
        plugged_everywhere(model, unknown) as (sites, bare, skipped),
        Recorder(model, sites, layers, options) as recorder,
    ):
        for batch in batches:
            batch = _to_device(batch, device)
            with recorder.listening(valid(batch) if callable(valid) else valid, batch):
                forward(model, batch)
            advance()
        if not recorder.layers:
            raise ValueError("no attention layer ran: expected at least one batch in inputs")
        skipped |= _without_response(sites) | dict.fromkeys(recorder.in_doubt, AXES_IN_DOUBT)
        if recorder.in_doubt:
            warnings.warn(axes_in_doubt(recorder.in_doubt), stacklevel=3)
        own = [s.filter for n, s in sites.items() if n not in bare]
        first = next(iter(recorder.layers.values()))
        return ModelReading(
            name=name,
            kind=type(model).__name__,
            parameters=parameters,
            filter_parameters=sum(p.numel() for f in own for p in f.parameters()),
            samples=recorder.samples,
            tokens=recorder.tokens,
            spectral_samples=first.spectral_samples,
            seconds={"total": time.perf_counter() - start, **recorder.watch.seconds},
            features=recorder.features(),
            attention=recorder.attention(bare),
            skipped=skipped,
        )


def _call(model: nn.Module, batch: Any) -> Any:
    """Call a model; an error says how a batch of several parts, maybe with targets, was passed."""
    try:
        return call(model, batch)
    except Exception as error:
        # Python 3.10 has no notes
        if isinstance(batch, tuple) and hasattr(error, "add_note"):
            error.add_note(
                f"diagnose called the model with the {len(batch)} parts of a batch as its "
                "arguments; to pass some of them alone: "
                "diagnose(..., forward=lambda model, batch: model(batch[0]))"
            )
        raise


def _without_response(sites: Mapping[str, Site]) -> dict[str, str]:
    """The layers whose filter has no frequency response, with the reason."""
    return {
        name: f"{type(site.filter).__name__} is not a polynomial of its map: its tokens are shown, "
        "its response is not"
        for name, site in sites.items()
        if not site.filter.is_polynomial
    }


def _without_labels(batch: Any) -> Any:
    if isinstance(batch, list):
        batch = tuple(batch)
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        labels = batch[1]
        if labels.dim() <= 1 and not labels.is_floating_point() and labels.dtype != torch.bool:
            return batch[0]
    return batch


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _to_device(part, device) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_to_device(part, device) for part in batch)
    if hasattr(batch, "to") and not inspect.isclass(batch):
        return batch.to(device)
    return batch


Progress = Callable[[int, int | None], None]


@contextmanager
def progress_bar(
    progress: bool | Progress | None, title: str, total: int | None
) -> Iterator[Callable[[], None]]:
    """Yields a function that the caller calls after each batch."""
    if callable(progress):
        report, done = progress, 0

        def advance() -> None:
            nonlocal done
            done += 1
            report(done, total)

        yield advance
        return
    if progress is None:
        # a single batch needs no bar
        progress = sys.stderr.isatty() and total != 1
    if not progress:
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        raise ImportError("a progress bar needs rich: pip install rich") from None
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"measuring {title}", total=total)
        yield lambda: bar.advance(task)
