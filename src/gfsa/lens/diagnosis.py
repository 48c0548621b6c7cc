"""``gfsa.diagnose``: run a model on some data and measure every layer."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from datetime import datetime, timezone
from operator import length_hint
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gfsa.filters import GFSA, GraphFilter
from gfsa.lens import measure
from gfsa.lens.readings import (
    AttentionReading,
    FeatureReading,
    ModelReading,
    OwnValue,
    Spectrum,
    printable,
)
from gfsa.lens.report import LensReport
from gfsa.lens.watch import (
    AXES_IN_DOUBT,
    AxesInDoubtError,
    Layer,
    Watch,
    checked_mask,
    tokens_of,
)
from gfsa.operators import Operator
from gfsa.operators.operator import own_share, repeat_heads
from gfsa.plugs.checks.called import compiled_parts
from gfsa.plugs.install import install, uninstall
from gfsa.plugs.registry import Unknown
from gfsa.plugs.running import call
from gfsa.plugs.sites import (
    Layers,
    Site,
    accepting_sites,
    grouped_reasons,
    plugged_sites,
    select_layers,
    sites,
)
from gfsa.plugs.transaction import unchanged

Forward = Callable[[nn.Module, Any], Any]
"""Calls a model on a batch."""
Valid = Tensor | Callable[[Any], Tensor | None] | None
"""Which tokens count, or a function of the batch that says so."""


class _Options(NamedTuple):
    """What to measure and how, as :func:`diagnose` takes it."""

    layers: Layers
    features: bool
    attention: bool
    spectral: bool
    valid: Valid
    forward: Forward
    spectral_samples: int
    most_frequencies: int
    most_tokens: int
    unknown: Unknown


def diagnose(
    model: nn.Module | Mapping[str, nn.Module],
    inputs: Any,
    layers: Layers = "all",
    features: bool = True,
    attention: bool = True,
    spectral: bool = True,
    valid: Valid = None,
    forward: Forward | None = None,
    max_batches: int | None = None,
    spectral_samples: int = 8,
    most_frequencies: int = 33,
    most_tokens: int = 1024,
    unknown: Unknown = "refuse",
    progress: bool | None = None,
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
        most_tokens: no n×n map is built beyond this length: no entropy, no ``A_ii`` and no
            singular values of maps. Up to it, the maps of a layer are in memory for a whole batch.
        unknown: attention that no adapter knows is skipped (``"refuse"``) or traced
            (``"trace"``), as in :func:`gfsa.plug`.
        progress: whether to show a progress bar; default: in a terminal.

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
    options = _Options(
        layers, features, attention, spectral, valid, forward or _call,
        spectral_samples, most_frequencies, most_tokens, unknown,
    )  # fmt: skip
    is_one = isinstance(inputs, (Tensor, Mapping, tuple)) or not isinstance(inputs, Iterable)
    batches = [inputs] if is_one else inputs
    if len(models) > 1 and isinstance(batches, Iterator):
        # a generator can be iterated only once
        batches = list(batches)
    known = length_hint(batches, -1)
    total = None if known < 0 else min(known, known if max_batches is None else max_batches)
    if progress is None:
        # a single batch needs no bar
        progress = sys.stderr.isatty() and total != 1
    readings = {}
    for name, module in models.items():
        chosen = itertools.islice(batches, max_batches)
        shown = _with_progress(chosen, name, total) if progress else chosen
        shown = shown if is_one else map(_without_labels, shown)
        readings[name] = _measure(name, module, shown, options)
    return LensReport(readings, created=datetime.now(timezone.utc).isoformat(timespec="seconds"))


def _measure(
    name: str, model: nn.Module, batches: Iterable[Any], options: _Options
) -> ModelReading:
    """The readings of one model, which runs with a filter in every attention module.

    The added filters are ordinary attention, bit for bit, so the model computes what it did.
    """
    # the module inside of a compiled one has the names of layers
    model = getattr(model, "_orig_mod", model)
    parameters = sum(p.numel() for p in model.parameters())
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    start = time.perf_counter()
    found = sites(model, options.unknown)
    skipped = {name: site.refusal for name, site in found.items() if site.refusal is not None}
    accepting = accepting_sites(model, found).items()
    bare = {name: site for name, site in accepting if not site.is_plugged}
    # hooks that read numbers cannot be compiled; only then torch's compiler is imported
    is_compiled = bool(compiled_parts(model))
    eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    # also if Ctrl-C comes while the filters are removed
    with torch.no_grad(), eager, unchanged(model):
        model.eval()
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                # it would pack padded batches into nested tensors, which have no axes
                module.use_nested_tensor = False
        # in one pass, with no parameters
        install(model, [(s, GFSA(s.num_heads, K=None, learn=())) for s in bare.values()])
        plugged = plugged_sites(model)
        own = [site.filter for name, site in plugged.items() if name not in bare]
        recorder = _Recorder(model, plugged, options)
        for batch in batches:
            recorder.run(_to_device(batch, device))
        layers = recorder.attention(bare)
        uninstall(model, [plugged[name] for name in bare])
    if len(recorder.records) == 1:
        raise ValueError("no attention layer ran: expected at least one batch in inputs")
    in_doubt = {name: why for name, why in recorder.skipped.items() if why == AXES_IN_DOUBT}
    if in_doubt:
        warnings.warn("; ".join(grouped_reasons(in_doubt)), stacklevel=3)
    return ModelReading(
        name=name,
        kind=type(model).__name__,
        parameters=parameters,
        filter_parameters=sum(p.numel() for filter in own for p in filter.parameters()),
        samples=recorder.samples,
        tokens=recorder.tokens,
        spectral_samples=max(record.spectral_samples for record in recorder.records.values()),
        seconds=time.perf_counter() - start,
        features=recorder.features(),
        attention=layers,
        skipped=skipped | recorder.skipped,
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


def _without_labels(batch: Any) -> Any:
    if isinstance(batch, list):
        batch = tuple(batch)
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        labels = batch[1]
        if labels.dim() <= 1 and not labels.is_floating_point() and labels.dtype != torch.bool:
            return batch[0]
    return batch


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, tuple):
        return tuple(_to_device(part, device) for part in batch)
    # transformers' batches are mappings, PyG's have a method
    if isinstance(batch, Mapping):
        return {key: _to_device(part, device) for key, part in batch.items()}
    return batch.to(device) if hasattr(batch, "to") and not inspect.isclass(batch) else batch


def _with_progress(batches: Iterable[Any], name: str, total: int | None) -> Iterable[Any]:
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        raise ImportError("a progress bar needs rich: pip install rich") from None
    return track(batches, f"measuring {name}", total, console=Console(stderr=True), transient=True)


class _Recorder:
    """Measures the layers of a model whose attention modules are all plugged (``sites``)."""

    def __init__(self, model: nn.Module, sites: dict[str, Site], options: _Options) -> None:
        self.model = model
        self.sites = sites
        self.options = options
        attention = {name: site.module for name, site in sites.items()}
        self.selected = select_layers(attention, options.layers)
        self.watch = Watch(model, attention, self._on_layer, self._on_filter)
        self.skipped: dict[str, str] = {}
        """Layers (or the input) of which something was left out, with the reason."""
        self.entry = _Record("input", 0, options)
        self.records = {("input", -1): self.entry}
        """By name and run in a forward: models such as ALBERT run one module at every depth."""
        self.samples = 0
        self.tokens = 0

    def run(self, batch: Any) -> None:
        """Measure one forward of the model on ``batch``."""
        valid = self.options.valid
        self._valid = checked_mask(valid(batch) if callable(valid) else valid)
        self._turns: dict[str, int] = defaultdict(int)
        # the layer whose filter ran last, and its record
        self._last: tuple[Layer, _Record] | None = None
        self.watch.start(self._valid, batch)
        try:
            self.options.forward(self.model, batch)
        finally:
            self.watch.is_idle = True

    def features(self) -> list[FeatureReading]:
        records = (record for record in self.records.values() if record.features)
        return [record.feature_reading(self._title(record)) for record in records]

    def attention(self, bare: Collection[str]) -> list[AttentionReading]:
        """One reading a layer; those whose name is in ``bare`` have no filter of their own."""
        return [
            record.attention_reading(self._title(record), filter, record.name in bare)
            for record in self.records.values()
            if record.name in self.selected
            and (filter := self.sites[record.name].filter).is_polynomial
        ]

    def _title(self, record: _Record) -> str:
        """The name of a layer, with a number if its module runs more than once."""
        runs = [other for other in self.records.values() if other.name == record.name]
        several = f"{record.name} (run {runs.index(record) + 1})"
        return several if len(runs) > 1 else record.name

    def _on_filter(
        self, layer: Layer, filter: GraphFilter, operator: Operator, v: Tensor, y: Tensor
    ) -> None:
        name, length, options = layer.name, v.shape[-2], self.options
        if y.shape[-2] != length:
            raise ValueError(
                f"{name}: {y.shape[-2]} new tokens attend to {length}: the lens measures whole "
                "sequences, not decoding steps; leave past_key_values out"
            )
        key = name, self._turns[name]
        self._turns[name] += 1
        record = self.records.setdefault(key, _Record(name, len(self.records), options))
        is_first, self._last = self._last is None, (layer, record)
        if is_first and layer.entered is not None:
            self._begin(layer, layer.entered)
        if name not in self.selected:
            return
        if not filter.is_polynomial:
            why = (
                f"{type(filter).__name__} is not a polynomial of its map: its tokens are shown, "
                "its response is not"
            )
            self.skipped.setdefault(name, why)
            return
        if length > options.most_tokens and (options.attention or options.spectral):
            why = (
                f"no entropy and no singular values: maps of more than {options.most_tokens} "
                f"tokens are not built, and these have {length} (most_tokens=)"
            )
            self.skipped.setdefault(name, why)
        # (..., heads, tokens, features)
        if y.dim() == 4:
            self._mask(layer, y.transpose(1, 2).flatten(2), f"leave the attention of {name}")
        valid = layer.mask((*v.shape[:-3], length), v.device)
        record.add_attention(filter, operator, v, y, valid)

    def _begin(self, layer: Layer, entered: Tensor) -> None:
        """Count samples and tokens, and measure the input of the first block."""
        attended, tokens = layer.attended, None
        assert attended is not None
        sizes = (attended.batch, attended.length)
        try:
            tokens = tokens_of(entered, layer, layer.block)
            if tokens is None:
                return
            sizes = (tokens.shape[0], tokens.shape[1])
        except AxesInDoubtError:
            # how many there are is known
            pass
        if self._valid is not None and self._valid.shape != sizes:
            raise ValueError(
                f"valid must be a mask of the tokens that enter the first block, "
                f"{sizes} here (batch, tokens), got {tuple(self._valid.shape)}"
            )
        valid = layer.mask(sizes, entered.device)
        self.samples += sizes[0]
        self.tokens += sizes[0] * sizes[1] if valid is None else int(valid.sum())
        self._add_features(self.entry, layer, tokens)

    def _on_layer(self, layer: Layer) -> None:
        """Measure the output of the last block."""
        if self._last is not None and layer is self._last[0]:
            self._add_features(self._last[1], layer, layer.tokens)

    def _add_features(self, record: _Record, layer: Layer, tokens: Tensor | None) -> None:
        """Measure tokens of a layer, or note what was left out, unless nobody asked for them."""
        if not self.options.features or layer.name not in self.selected:
            return
        is_input = record is self.entry
        if tokens is not None:
            leave = f"leave the block of {layer.name}"
            mask = self._mask(layer, tokens, "enter the first block" if is_input else leave)
            record.add_features(tokens, mask)
        else:
            self.skipped["the input of the first block" if is_input else layer.name] = AXES_IN_DOUBT

    def _mask(self, layer: Layer, tokens: Tensor, which: str) -> Tensor | None:
        """The mask of tokens ``(B, N, D)``; raises if one that counts is NaN or infinite."""
        valid = layer.mask(tokens.shape[:2], tokens.device)
        counted = tokens if valid is None else tokens[valid]
        if not bool(counted.isfinite().all()):
            raise ValueError(
                f"tokens that {which} have features that are NaN or infinite, so there is nothing "
                "to measure: the weights diverged, the inputs are not finite, or "
                f"{tokens.dtype} overflows"
            )
        return valid


# name → sums over samples, and how many of them were known
_Sums = dict[str, tuple[Tensor, Tensor]]

# points of the axis on which singular values of several lengths are averaged
_POINTS = 64


class _Record:
    """The measurements of one layer so far, by their names in readings."""

    def __init__(self, name: str, depth: int, options: _Options) -> None:
        self.name = name
        self.depth = depth
        self.options = options
        self.features: _Sums = {}
        self.heads: _Sums = {}
        self.frequencies: Tensor | None = None
        self.spectral_samples = 0

    def add_features(self, x: Tensor, valid: Tensor | None) -> None:
        """Measure tokens ``(B, N, D)`` with their mask ``(B, N)``."""
        most = measure.token_count(x, valid).clamp(max=x.shape[-1])
        values = measure.singular_values(x, valid)
        found = {
            "cosine": measure.cosine_similarity(x, valid),
            "residual": measure.rank_one_residual(x, valid),
            "norm": measure.token_norm(x, valid),
            "effective_rank": measure.effective_rank(values),
            "most_rank": most,
            "singular_values": _profile(self.features.get("singular_values"), values, most),
        }
        for name, value in found.items():
            _add(self.features, name, value)

    def add_attention(
        self, filter: GraphFilter, operator: Operator, v: Tensor, y: Tensor, valid: Tensor | None
    ) -> None:
        """Measure a map, the values ``(..., H, N, D)`` and the filter's output.

        ``valid``: ``(..., N)`` or None.
        """
        options, share, found = self.options, filter.share(), dict[str, Tensor]()
        is_spectral = options.spectral and self.spectral_samples < options.spectral_samples
        if not options.attention and not is_spectral:
            return
        length = v.shape[-2]
        of_heads = None if valid is None else valid[..., None, :]
        smoothed = operator.apply(v)
        spread = repeat_heads(v, smoothed)
        matrix = measure.dense_map(operator, v) if length <= options.most_tokens else None
        if options.attention:
            found["energy_before"] = measure.dirichlet_energy(spread, smoothed, of_heads)
            found["energy_after"] = measure.dirichlet_energy(y, operator.apply(y), of_heads)
            if matrix is not None:
                visible = operator.visibility()
                seen = None if visible is None else visible.rows(0, length, length, v.device)
                entropy = measure.attention_entropy(matrix, seen, valid)
                found["entropy"], found["entropy_share"] = entropy
            if share is not None:
                own = {
                    "part": own_share(v.new_ones(()), smoothed, spread).squeeze(-1),
                    "cosine": torch.cosine_similarity(y.double(), spread.double(), dim=-1),
                }
                if matrix is not None:
                    own["weight"] = matrix.diagonal(dim1=-2, dim2=-1)
                for name, value in own.items():
                    hidden = value if of_heads is None else value.masked_fill(~of_heads, math.nan)
                    found[f"own_{name}"] = hidden.nanmean(-1)
        if is_spectral:
            self.spectral_samples += v.shape[:-3].numel()
            if self.frequencies is None:
                self.frequencies = measure.frequency_grid(length, options.most_frequencies)
            taken = None if share is None else own_share(share.detach(), smoothed, spread)
            found["map_response"], found["filter_response"] = measure.frequency_response(
                operator, v, filter.coefficients().detach(), valid, self.frequencies, taken
            )
            if matrix is not None:
                most = measure.token_count(matrix, of_heads)
                values = measure.map_singular_values(matrix.double(), valid)
                profile = _profile(self.heads.get("map_values"), values, most)
                found["map_values"] = profile * values[..., :1]
        for name, value in found.items():
            # of several axes of samples, or none, one
            rows = value.reshape(v.shape[:-3].numel(), *value.shape[v.dim() - 3 :])
            _add(self.heads, name, rows)

    def feature_reading(self, name: str) -> FeatureReading:
        return FeatureReading(self.depth, name, **_means(self.features))

    def attention_reading(self, name: str, filter: GraphFilter, bare: bool) -> AttentionReading:
        """The reading; ``bare``: the layer has no filter besides the one the lens plugged."""
        coefficients = filter.coefficients().detach().double().cpu()
        missing = [math.nan] * filter.num_heads
        means = _means(self.heads)
        scalars = ("entropy", "entropy_share", "energy_before", "energy_after")
        spectrum = own = None
        if self.frequencies is not None:
            responses = (means["map_response"], means["filter_response"])
            spectrum = Spectrum(self.frequencies.tolist(), *responses, means.get("map_values", []))
        if "own_part" in means:
            weight = means.get("own_weight", missing)
            own = OwnValue(means["own_part"], weight, means["own_cosine"])
        r, share, start = filter.depth(), filter.share(), filter.base_share
        terms = [] if r is None else r.tolist()
        if share is not None and start is not None and filter.learns_share:
            terms += (share - start).tolist()
        return AttentionReading(
            depth=self.depth,
            name=name,
            filter=None if bare else repr(filter),
            coefficients=coefficients.tolist(),
            verdict=measure.verdicts(coefficients),
            spectrum=spectrum,
            own=own,
            terms=terms,
            **{what: means.get(what, missing) for what in scalars},
        )


def _add(sums: _Sums, name: str, rows: Tensor) -> None:
    """Add what was measured, a row for each sample; NaN where it is not known."""
    rows = rows.detach().double().cpu()
    total, count = sums.get(name, (0.0, 0))
    sums[name] = total + rows.nansum(0), count + (~rows.isnan()).sum(0)


def _means(sums: _Sums) -> dict[str, Any]:
    """Means over samples, as floats or nested lists of them; NaN where nothing was known."""
    return {name: (total / count).tolist() for name, (total, count) in sums.items()}


def _profile(before: tuple[Tensor, Tensor] | None, values: Tensor, most: Tensor) -> Tensor:
    """Singular values on the axis of the first batch: later ones may be longer or shorter."""
    points = min(values.shape[-1], _POINTS) if before is None else before[0].shape[-1]
    return measure.singular_profile(values, most, points)
