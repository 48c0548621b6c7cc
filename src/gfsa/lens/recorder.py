"""Records the tokens and attention maps of a running model with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gfsa.filters import GraphFilter
from gfsa.lens.axes import Attended, AxesInDoubtError, TokenReader, attended_by_values
from gfsa.lens.calls import Calls
from gfsa.lens.layer_record import LayerRecord, LensOptions, Stopwatch
from gfsa.lens.padding import Padding, checked_mask, padding_of
from gfsa.lens.readings import AttentionReading, FeatureReading
from gfsa.lens.sites import blocks_around
from gfsa.lens.tokens import first_tensor, whole_map
from gfsa.plugs.layer_selection import Layers, select_layers
from gfsa.plugs.sites import Site

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
