"""Plug every attention layer for a while, and record its tokens and maps with hooks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gfsa.filters import GFSA, GraphFilter
from gfsa.lens import measure
from gfsa.lens.readings import AttentionReading, FeatureReading, OwnValue, Spectrum
from gfsa.lens.tokens import (
    Attended,
    AxesInDoubtError,
    Calls,
    Padding,
    TokenReader,
    attended_by_values,
    blocks_around,
    checked_mask,
    first_tensor,
    padding_of,
)
from gfsa.operators import DenseOperator, Operator
from gfsa.operators.base import own_share, repeat_heads
from gfsa.plugs.install import install, uninstall
from gfsa.plugs.registry import Unknown
from gfsa.plugs.sites import Layers, Site, accepting_sites, plugged_sites, select_layers, sites
from gfsa.plugs.transaction import all_or_nothing


@contextmanager
def plugged_everywhere(
    model: nn.Module, unknown: Unknown
) -> Iterator[tuple[dict[str, Site], set[str], dict[str, str]]]:
    """Plug every attention module of the model that has no filter, and unplug it at the end.

    The added filters are ordinary attention, bit for bit, so the model computes what it did.

    Yields:
        The plugged sites, the names of those that were plugged here, and the refusals of the rest.
    """
    found = sites(model, unknown)
    accepting = accepting_sites(model, found)
    refusals = {name: site.refusal for name, site in found.items() if site.refusal is not None}
    bare = {name: site for name, site in accepting.items() if not site.is_plugged}
    # also if Ctrl-C comes while the filters are removed
    with all_or_nothing(model):
        install(model, [(site, _ordinary_attention(site.num_heads)) for site in bare.values()])
        plugged = plugged_sites(model)
        yield plugged, set(bare), refusals
        uninstall(model, [plugged[name] for name in bare])


@contextmanager
def no_nested_tensors(model: nn.Module) -> Iterator[None]:
    """Keep torch's encoders from packing padded batches into nested tensors, which have no axes."""
    packing = [
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor
    ]
    try:
        for module in packing:
            module.use_nested_tensor = False
        yield
    finally:
        for module in packing:
            module.use_nested_tensor = True


def _ordinary_attention(heads: int) -> GFSA:
    """A filter that is ordinary attention, in one pass, with no parameters."""
    return GFSA(heads, K=None, learn=())


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every self-attention module of the model that has a filter or can have one, by name."""
    accepting = accepting_sites(model, sites(model))
    return {name: site.module for name, site in accepting.items()}


# points of the axis on which singular values of several lengths are averaged
POINTS = 64


@dataclass
class LensOptions:
    """What to measure."""

    features: bool = True
    attention: bool = True
    spectral: bool = True
    spectral_samples: int = 8
    """Spectra are averaged over this many samples: they vary little, and are costly."""
    most_frequencies: int = 33
    most_tokens: int = 1024
    """For longer sequences no n×n map is built, so there are no singular values."""


class Stopwatch:
    """Seconds spent on each kind of measurement."""

    def __init__(self) -> None:
        self.seconds = {"features": 0.0, "attention": 0.0, "spectral": 0.0}

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - start


class Mean:
    """A running mean over samples that ignores NaN, element by element."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.count = torch.zeros(())

    def add(self, values: Tensor) -> None:
        """``values``: ``(samples, ...)``."""
        values = values.detach().double().cpu()
        known = ~values.isnan()
        self.total = self.total + torch.where(known, values, 0.0).sum(0)
        self.count = self.count + known.sum(0)

    def value(self) -> Any:
        """A float, or nested lists of them."""
        return torch.where(self.count > 0, self.total / self.count, math.nan).tolist()


class LayerRecord:
    """The measurements of one layer so far."""

    def __init__(self, depth: int, options: LensOptions, watch: Stopwatch) -> None:
        self.depth = depth
        self.options = options
        self.watch = watch
        self.features: dict[str, Mean] = {}
        self.heads: dict[str, Mean] = {}
        self.frequencies: Tensor | None = None
        self.spectral_samples = 0
        self.note = ""

    def add_features(self, x: Tensor, valid: Tensor | None) -> None:
        """Measure tokens ``(B, N, D)`` with their mask ``(B, N)``."""
        with self.watch.on("features"):
            most = measure.token_count(x, valid).clamp(max=x.shape[-1])
            values = measure.singular_values(x, valid)
            # later batches may be longer or shorter: the axis of the first batch is kept
            points = self._axis(self.features, "singular_values", values.shape[-1])
            found = {
                "cosine": measure.cosine_similarity(x, valid),
                "effective_rank": measure.effective_rank(values),
                "most_rank": most,
                "residual": measure.rank_one_residual(x, valid),
                "norm": measure.token_norm(x, valid),
                "singular_values": measure.singular_profile(values, most, points),
            }
            for name, value in found.items():
                self.features.setdefault(name, Mean()).add(value)

    def add_attention(
        self,
        filter: GraphFilter,
        operator: Operator,
        v: Tensor,
        y: Tensor,
        valid: Tensor | None,
    ) -> None:
        """Measure a map, the values ``(..., H, N, D)`` and the filter's output.

        ``valid``: ``(..., N)`` or None.
        """
        lead = v.shape[:-3]
        if valid is not None:
            # the mask does not apply to windows and other rearrangements of the tokens
            fits = valid.shape == (*lead, v.shape[-2])
            valid = valid.to(v.device) if fits else None
        found: dict[str, Tensor] = {}
        if self.options.attention:
            with self.watch.on("attention"):
                found |= _energies(operator, v, y, valid)
                # a map that is known only by its products takes n/D products to build
                if measure.has_rows(operator) or v.shape[-2] <= self.options.most_tokens:
                    entropy, share = measure.attention_entropy(operator, v, valid)
                    found |= {"entropy": entropy, "entropy_share": share}
                if filter.share() is not None:
                    found |= self._own_value(operator, v, y, valid)
        if self.options.spectral and self.spectral_samples < self.options.spectral_samples:
            with self.watch.on("spectral"):
                found |= self._spectra(filter, operator, v, valid)
        for name, value in found.items():
            heads = self.heads.setdefault(name, Mean())
            heads.add(value.flatten(0, len(lead) - 1) if lead else value[None])

    def feature_reading(self, name: str) -> FeatureReading:
        values = {what: mean.value() for what, mean in self.features.items()}
        return FeatureReading(depth=self.depth, name=name, **values)

    def attention_reading(self, name: str, filter: GraphFilter, bare: bool) -> AttentionReading:
        """The reading; ``bare``: the layer has no filter besides the one the lens plugged."""
        coefficients = filter.coefficients().detach().double().cpu()
        missing = [math.nan] * filter.num_heads
        means = {what: mean.value() for what, mean in self.heads.items()}
        scalars = ("entropy", "entropy_share", "energy_before", "energy_after")
        return AttentionReading(
            depth=self.depth,
            name=name,
            filter=None if bare else repr(filter),
            coefficients=coefficients.tolist(),
            verdict=[measure.verdict(row) for row in coefficients],
            spectrum=self._spectrum_reading(means),
            own=self._own_reading(means, missing),
            **{what: means.get(what, missing) for what in scalars},
        )

    def _spectrum_reading(self, means: dict[str, Any]) -> Spectrum | None:
        if self.frequencies is None:
            return None
        return Spectrum(
            frequencies=self.frequencies.tolist(),
            map_response=means["map_response"],
            filter_response=means["filter_response"],
            map_values=means.get("map_values", []),
            filter_values=means.get("filter_values", []),
            note=self.note,
        )

    @staticmethod
    def _own_reading(means: dict[str, Any], missing: list[float]) -> OwnValue | None:
        if "own_part" not in means:
            return None
        weight = means.get("own_weight", missing)
        return OwnValue(means["own_part"], weight, means["own_cosine"])

    def _own_value(
        self, operator: Operator, v: Tensor, y: Tensor, valid: Tensor | None
    ) -> dict[str, Tensor]:
        """Means over tokens of p, ``A_ii`` and ``cos(y, v)``."""
        counted = None if valid is None else valid[..., None, :]
        v = repeat_heads(v, y).double()
        p = own_share(v.new_ones(()), operator.apply(v.to(y.dtype)), v).squeeze(-1)
        cosine = torch.nn.functional.cosine_similarity(y.double(), v, dim=-1)
        found = {"own_part": p, "own_cosine": cosine}
        if v.shape[-2] <= self.options.most_tokens:
            found["own_weight"] = measure.dense_map(operator, v).diagonal(dim1=-2, dim2=-1)
        if counted is not None:
            found = {what: x.masked_fill(~counted, math.nan) for what, x in found.items()}
        return {what: x.nanmean(-1) for what, x in found.items()}

    def _spectra(
        self, filter: GraphFilter, operator: Operator, v: Tensor, valid: Tensor | None
    ) -> dict[str, Tensor]:
        length = v.shape[-2]
        coefficients, share, own = filter.coefficients().detach(), filter.share(), None
        if share is not None:
            share = share.detach()
            own = own_share(share, operator.apply(v), repeat_heads(v, share[:, None, None]))
        if self.frequencies is None:
            self.frequencies = measure.frequency_grid(length, self.options.most_frequencies)
        self.spectral_samples += v.shape[:-3].numel()
        on_map, on_filter = measure.frequency_response(
            operator, v, coefficients, valid, self.frequencies, own
        )
        found = {"map_response": on_map, "filter_response": on_filter}
        if length > self.options.most_tokens:
            self.note = (
                f"no singular values: maps of more than {self.options.most_tokens} tokens are not "
                f"built, and these have {length} (most_tokens=)"
            )
            return found
        matrix = measure.dense_map(operator, v).double()
        most = measure.token_count(matrix, None if valid is None else valid[..., None, :])
        points = self._axis(self.heads, "map_values", length)
        values = measure.map_singular_values(matrix, valid)
        found["map_values"] = measure.singular_profile(values, most, points) * values[..., :1]
        found["filter_values"] = found["map_values"]
        if share is not None or not _is_ordinary(coefficients):
            filtered = DenseOperator(matrix).filter(coefficients.double(), share, v.double())
            values = measure.map_singular_values(filtered, valid)
            profile = measure.singular_profile(values, most, points)
            found["filter_values"] = profile * values[..., :1]
        return found

    @staticmethod
    def _axis(means: dict[str, Mean], name: str, length: int) -> int:
        return means[name].total.shape[-1] if name in means else min(length, POINTS)


def _is_ordinary(coefficients: Tensor) -> bool:
    """Whether the filter is attention itself, head by head."""
    identity = torch.zeros_like(coefficients)
    identity[..., 1:2] = 1
    return torch.equal(coefficients, identity)


def _energies(operator: Operator, v: Tensor, y: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
    of_heads = None if valid is None else valid[..., None, :]
    smoothed = operator.apply(v)
    return {
        "energy_before": measure.dirichlet_energy(repeat_heads(v, smoothed), smoothed, of_heads),
        "energy_after": measure.dirichlet_energy(y, operator.apply(y), of_heads),
    }


# a layer is an attention module and the number of its earlier runs in the same forward: models
# such as ALBERT run one module at every depth
Key = tuple[str, int]


@dataclass
class _Forward:
    """The state of the forward that is recorded."""

    valid: Tensor | None = None
    turns: dict[str, int] = field(default_factory=dict)
    entered: tuple[nn.Module, Tensor] | None = None
    """The first block and its input, until the first attention shows its axes."""
    given: tuple[nn.Module, Tensor | None] | None = None
    """The module among blocks and attention that was called last, and its input."""
    key: Key | None = None
    """The layer whose attention ran last; below, its tokens and their masks."""
    attended: Attended | None = None
    padding: Padding = field(default_factory=Padding)
    mask: Tensor | None = None
    """The mask of the tokens that the attention attends to."""
    left: Tensor | None = None
    """The tokens that leave the outermost block around it that has ended."""
    in_doubt: bool = False
    """Whether what leaves that block can be read in several ways."""


class Recorder:
    """Hooks on a model whose attention modules are all plugged.

    .. code-block:: python

        with plugged_everywhere(model, "refuse") as (sites, bare, refusals):
            with Recorder(model, sites) as recorder, recorder.listening():
                model(**batch)
            recorder.features(), recorder.attention(bare)

    Args:
        model: as given to :func:`gfsa.lens.record.plugged_everywhere`.
        sites: its attention modules, all plugged.
        layers: which of them to measure, as in :func:`gfsa.plug`.
        options: what to measure.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: dict[str, Site],
        layers: Layers = "all",
        options: LensOptions | None = None,
    ) -> None:
        self.model = model
        self.sites = sites
        self.options = options or LensOptions()
        self.selected = select_layers({n: s.module for n, s in sites.items()}, layers)
        self.blocks = blocks_around(model, sites)
        self.reader = TokenReader()
        self.calls = Calls(model, self.blocks)
        self.in_doubt: list[str] = []
        """Layers (or the input) whose tokens were left out: axes could not be told apart."""
        self.watch = Stopwatch()
        self.entry = LayerRecord(0, self.options, self.watch)
        self.layers: dict[Key, LayerRecord] = {}
        self.samples = 0
        self.tokens = 0
        self._handles: list[RemovableHandle] = []
        self._now: _Forward | None = None

    def __enter__(self) -> Recorder:
        modules = dict(self.model.named_modules())
        self._handles += self.calls.watch()
        for name, site in self.sites.items():
            # the values with the depth term, which the filter multiplies by its map
            self._handles.append(site.filter.register_forward_pre_hook(_mix_first))
            self._handles.append(site.filter.register_forward_hook(self._on_filter(name)))
            for block in self.blocks[name]:
                entered, left = self._on_entry, self._on_exit(name)
                module = modules[block]
                self._handles.append(module.register_forward_pre_hook(entered, with_kwargs=True))
                self._handles.append(module.register_forward_hook(left, with_kwargs=True))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def listening(self, valid: Tensor | None = None, batch: Any = None) -> Iterator[None]:
        """Around one forward of the model; padding masks that it is called with are used.

        Args:
            valid: ``(B, N)``, True where a token counts; overrides all other masks.
            batch: what the call is made of; a padding mask in it counts as one that the model got.
        """
        self._now = _Forward(checked_mask(valid))
        self.calls.batch = batch
        try:
            yield
            self._finish_layer(self._now)
        finally:
            self._now = None
            self.calls.batch = None

    def features(self) -> list[FeatureReading]:
        records = {"input": self.entry} | {self._title(k): r for k, r in self.layers.items()}
        return [r.feature_reading(title) for title, r in records.items() if r.features]

    def attention(self, bare: set[str]) -> list[AttentionReading]:
        """One reading a layer; those whose name is in ``bare`` have no filter of their own."""
        return [
            record.attention_reading(
                self._title(key), self.sites[key[0]].filter, bare=key[0] in bare
            )
            for key, record in self.layers.items()
            if key[0] in self.selected and self.sites[key[0]].filter.is_polynomial
        ]

    def _title(self, key: Key) -> str:
        name, turn = key
        return f"{name} (run {turn + 1})" if (name, 1) in self.layers else name

    def _on_entry(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        now = self._now
        if now is None:
            return
        found = first_tensor((args, kwargs))
        now.given = (module, found)
        # the first block to begin is the outermost block around the first attention
        if found is not None and now.key is None and now.entered is None:
            now.entered = (module, found)

    def _on_exit(self, name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            now = self._now
            if now is None or now.key is None or now.key[0] != name:
                return
            # blocks end from the inside out, so the outermost that returns tokens is kept
            try:
                entered = first_tensor((args, kwargs))
                tokens = self._tokens(now, module, first_tensor(output), entered)
            except AxesInDoubtError:
                now.left, now.in_doubt = None, True
            else:
                if tokens is not None:
                    now.left, now.in_doubt = tokens, False

        return hook

    def _on_filter(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(filter: nn.Module, args: Any, output: Any) -> None:
            now = self._now
            if now is None:
                return
            assert isinstance(filter, GraphFilter)
            operator, v = args[0].whole(), args[1]
            if output.shape[-2] != v.shape[-2]:
                raise ValueError(
                    f"{name}: {output.shape[-2]} new tokens attend to {v.shape[-2]}: the lens "
                    "measures whole sequences, not decoding steps; leave past_key_values out"
                )
            # the measurements below must not be recorded themselves
            self._now = None
            try:
                self._finish_layer(now)
                turn = now.turns.get(name, 0)
                now.turns[name] = turn + 1
                first = now.key is None
                now.key = (name, turn)
                attention = self.sites[name].module
                now.attended = attended_by_values(attention, v)
                if now.given is not None and now.given[0] is attention:
                    self.reader.note(now.attended, now.given[1])
                now.padding = padding_of(self.calls.mask_of(name), operator, v, now.valid)
                now.mask = _unless_all(now.padding.of((*v.shape[:-3], v.shape[-2]), v.device))
                if now.key not in self.layers:
                    depth = len(self.layers) + 1
                    self.layers[now.key] = LayerRecord(depth, self.options, self.watch)
                if first:
                    self._begin(now)
                if name in self.selected and filter.is_polynomial:
                    # (..., heads, tokens, features)
                    if output.dim() == 4:
                        tokens = output.transpose(1, 2).flatten(2)
                        counted = now.padding.of(tokens.shape[:2], tokens.device)
                        _refuse_not_finite(tokens, counted, f"that leave the attention of {name}")
                    self.layers[now.key].add_attention(filter, operator, v, output, now.mask)
            finally:
                self._now = now

        return hook

    def _begin(self, now: _Forward) -> None:
        """Count samples and tokens, and measure the input of the first block."""
        assert now.key is not None
        assert now.attended is not None
        if now.entered is None:
            return
        (block, entered), now.entered = now.entered, None
        try:
            tokens = self._tokens(now, block, entered)
            if tokens is None:
                return
            sizes = tuple(tokens.shape[:2])
        except AxesInDoubtError:
            # how many there are is known
            tokens, sizes = None, now.attended[:2]
            self._leave_out(now.key[0], "the input of the first block")
        if now.valid is not None and now.valid.shape != sizes:
            raise ValueError(
                f"valid must be a mask of the tokens that enter the first block, "
                f"{sizes} here (batch, tokens), got {tuple(now.valid.shape)}"
            )
        valid = _unless_all(now.padding.of(sizes, entered.device))
        self.samples += sizes[0]
        self.tokens += sizes[0] * sizes[1] if valid is None else int(valid.sum())
        if tokens is not None and self.options.features and now.key[0] in self.selected:
            _refuse_not_finite(tokens, valid, "that enter the first block")
            self.entry.add_features(tokens, valid)

    def _finish_layer(self, now: _Forward) -> None:
        """Measure the output of the last block."""
        tokens, in_doubt = now.left, now.in_doubt
        now.left, now.in_doubt = None, False
        if now.key is None:
            return
        if in_doubt:
            self._leave_out(now.key[0], now.key[0])
        if tokens is not None and self.options.features and now.key[0] in self.selected:
            valid = _unless_all(now.padding.of(tokens.shape[:2], tokens.device))
            _refuse_not_finite(tokens, valid, f"that leave the block of {now.key[0]}")
            self.layers[now.key].add_features(tokens, valid)

    def _tokens(
        self, now: _Forward, block: nn.Module, x: Tensor | None, entered: Tensor | None = None
    ) -> Tensor | None:
        """Features as ``(B, N, D)``; None if they are not features of tokens."""
        assert now.attended is not None
        if x is None:
            return None
        return self.reader.tokens(x, now.attended, block, entered, now.mask)

    def _leave_out(self, layer: str, what: str) -> None:
        """Note tokens of a layer that are not measured, unless nobody asked for them."""
        is_asked_for = self.options.features and layer in self.selected
        if is_asked_for and what not in self.in_doubt:
            self.in_doubt.append(what)


def _mix_first(filter: nn.Module, args: tuple[Operator, Tensor]) -> tuple[Operator, Tensor]:
    assert isinstance(filter, GraphFilter)
    return args[0], filter.mixed(*args)


def _unless_all(valid: Tensor | None) -> Tensor | None:
    """A mask that hides something, else None: without a mask less is computed."""
    return None if valid is None or bool(valid.all()) else valid


def _refuse_not_finite(tokens: Tensor, valid: Tensor | None, which: str) -> None:
    """Raise if a token that counts has features that are NaN or infinite."""
    counted = tokens if valid is None else tokens[valid]
    if not bool(counted.isfinite().all()):
        raise ValueError(
            f"tokens {which} have features that are NaN or infinite, so there is nothing to "
            f"measure: the weights diverged, the inputs are not finite, or {tokens.dtype} overflows"
        )
