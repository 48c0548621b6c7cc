"""Records the tokens and attention maps of a running model with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gfsa.filters import GraphFilter
from gfsa.lens import metrics
from gfsa.lens.layer_record import LayerRecord, LensOptions, Stopwatch
from gfsa.lens.readings import AttentionReading, FeatureReading
from gfsa.lens.sites import blocks_around
from gfsa.lens.tokens import (
    as_tokens,
    first_tensor,
    fits,
    valid_from_batch,
    valid_from_operator,
    whole_map,
)
from gfsa.plugs.layer_selection import Layers, select_layers
from gfsa.plugs.sites import Site

# a layer is an attention module and the number of its earlier runs in the same forward: models
# such as ALBERT run one module at every depth
Key = tuple[str, int]


@dataclass
class _Forward:
    """The state of the forward that is recorded."""

    batch: Any = None
    valid: Tensor | None = None
    turns: dict[str, int] = field(default_factory=dict)
    entered: Tensor | None = None
    """The input of the first block, until the first attention shows its axes."""
    key: Key | None = None
    """The layer whose attention ran last; below, its values and mask."""
    v: Tensor | None = None
    mask: Tensor | None = None
    left: Tensor | None = None
    """The output of the outermost block around it that has ended."""


class Recorder:
    """Hooks on a model whose attention modules are all plugged.

    .. code-block:: python

        with plugged_everywhere(model, "refuse") as (sites, bare, refusals):
            with Recorder(model, sites) as recorder, recorder.listening(batch):
                model(**batch)
            recorder.features(), recorder.attention(bare)

    Args:
        model: as given to :func:`gfsa.lens.sites.plugged_everywhere`.
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
        self.watch = Stopwatch()
        self.entry = LayerRecord(0, self.options, self.watch)
        self.layers: dict[Key, LayerRecord] = {}
        self.samples = 0
        self.tokens = 0
        self._handles: list[RemovableHandle] = []
        self._now: _Forward | None = None

    def __enter__(self) -> Recorder:
        modules = dict(self.model.named_modules())
        for name, site in self.sites.items():
            self._handles.append(site.filter.register_forward_hook(self._on_filter(name)))
            for block in self.blocks[name]:
                entered, left = self._on_entry, self._on_exit(name)
                module = modules[block]
                self._handles.append(module.register_forward_pre_hook(entered, with_kwargs=True))
                self._handles.append(module.register_forward_hook(left))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def listening(self, batch: Any = None, valid: Tensor | None = None) -> Iterator[None]:
        """Around one forward of the model.

        Args:
            batch: the model's inputs; padding masks in it are used.
            valid: ``(B, N)``, True where a token counts; overrides all other masks.
        """
        self._now = _Forward(batch, valid)
        try:
            yield
            self._finish_layer(self._now)
        finally:
            self._now = None

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
        # the first block to begin is the outermost block around the first attention
        if now is not None and now.key is None and now.entered is None:
            now.entered = first_tensor(args)
            if now.entered is None:
                now.entered = first_tensor(kwargs)

    def _on_exit(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            now = self._now
            if now is None or now.key is None or now.key[0] != name:
                return
            found = first_tensor(output)
            # blocks end from the inside out, so the outermost that returns tokens is kept
            if found is not None and self._tokens(now, found) is not None:
                now.left = found

        return hook

    def _on_filter(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(filter: nn.Module, args: Any, output: Any) -> None:
            now = self._now
            if now is None:
                return
            assert isinstance(filter, GraphFilter)
            operator, v = whole_map(args[0]), args[1]
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
                now.key, now.v = (name, turn), v
                now.mask = now.valid if now.valid is not None else valid_from_batch(now.batch, name)
                if now.mask is None or now.mask.shape[-1] != v.shape[-2]:
                    now.mask = valid_from_operator(operator, v)
                if now.key not in self.layers:
                    depth = len(self.layers) + 1
                    self.layers[now.key] = LayerRecord(depth, self.options, self.watch)
                if first:
                    self._begin(now)
                if name in self.selected and filter.is_polynomial:
                    # (..., heads, tokens, features)
                    if output.dim() == 4:
                        tokens = output.transpose(1, 2).flatten(2)
                        counted = fits(now.mask, tokens)
                        _refuse_not_finite(tokens, counted, f"that leave the attention of {name}")
                    self.layers[now.key].add_attention(filter, operator, v, output, now.mask)
            finally:
                self._now = now

        return hook

    def _begin(self, now: _Forward) -> None:
        """Count samples and tokens, and measure the input of the first block."""
        tokens = None if now.entered is None else self._tokens(now, now.entered)
        now.entered = None
        if tokens is None:
            return
        if now.valid is not None and fits(now.valid, tokens) is None:
            raise ValueError(
                f"valid must be a mask of the tokens that enter the first block, "
                f"{tuple(tokens.shape[:2])} here (batch, tokens), got {tuple(now.valid.shape)}"
            )
        valid = fits(now.mask, tokens)
        self.samples += len(tokens)
        self.tokens += int(metrics.token_count(tokens, valid).sum())
        if self.options.features and now.key is not None and now.key[0] in self.selected:
            _refuse_not_finite(tokens, valid, "that enter the first block")
            self.entry.add_features(tokens, valid)

    def _finish_layer(self, now: _Forward) -> None:
        """Measure the output of the last block."""
        if now.left is None or now.key is None:
            return
        tokens = self._tokens(now, now.left)
        now.left = None
        if tokens is not None and self.options.features and now.key[0] in self.selected:
            valid = fits(now.mask, tokens)
            _refuse_not_finite(tokens, valid, f"that leave the block of {now.key[0]}")
            self.layers[now.key].add_features(tokens, valid)

    def _tokens(self, now: _Forward, x: Tensor) -> Tensor | None:
        assert now.key is not None
        assert now.v is not None
        return as_tokens(x, now.v, self.sites[now.key[0]].module, now.mask)


def _refuse_not_finite(tokens: Tensor, valid: Tensor | None, which: str) -> None:
    """Raise if a token that counts has features that are NaN or infinite."""
    counted = tokens if valid is None else tokens[valid]
    if not bool(counted.isfinite().all()):
        raise ValueError(
            f"tokens {which} have features that are NaN or infinite, so there is nothing to "
            f"measure: the weights diverged, the inputs are not finite, or {tokens.dtype} overflows"
        )
