"""Check one model: plugged by default and by tracing, against the dense reference.

Each model runs in float64 without dropout, with random filters, on several batch sizes (one sample,
and as many as it has heads, among them) and two lengths, all on one plugged instance: what the
first forward has verified must hold for the later ones. Then gradients, decoding with a cache,
saving and loading, and unplugging.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gfsa
from census.catalogue import Entry, randomise
from census.inputs import Batch, attempts, batch_for
from census.reference import (
    DenseReference,
    Layout,
    NoReferenceError,
    NotSquareError,
    Observation,
    Observer,
    layout_of,
)
from census.shrink import HEADS
from census.tokens import TokenProbe
from census.verdict import Finding, Verdict
from gfsa.plugs import registry
from gfsa.plugs.sites import sites
from gfsa.plugs.tracing.adapter import TRACER, TraceError, TracerAdapter

Mode = Literal["default", "traced"]
SHAPES = ((1, 7), (2, 10), (HEADS, 7))
"""(samples, length) of the forwards, in this order."""
OBSERVED = 3
"""Samples of the observed forwards: not the number of heads of any tiny model."""
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
MOST_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-2}
SINGLE_ROUNDING = 1e-5
MOST_PARAMETERS = {"transformers": 12_000_000, "timm": 32_000_000}
"""A model of transformers above this has a part whose config was not made small."""


class WrongError(Exception):
    """The plugged model differs from the reference."""


class _NotRunnableError(Exception):
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
                errors.append(f"{'+'.join(sources)}: {_one_line(error)}")
                continue
            if not outputs:
                errors.append(f"{'+'.join(sources)}: no tensor comes out")
            elif not all(bool(y.isfinite().any()) for y in outputs):
                errors.append(f"{'+'.join(sources)}: its outputs are NaN")
            else:
                return sources
        raise _NotRunnableError(
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


def difference(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest number of the same tensor."""
    got, expected = _comparable(got, expected)
    if [y.shape for y in got] != [y.shape for y in expected]:
        raise WrongError(
            f"outputs {[tuple(y.shape) for y in got]} instead of "
            f"{[tuple(y.shape) for y in expected]}"
        )
    largest = 0.0
    for mine, theirs in zip(got, expected, strict=True):
        finite = theirs.isfinite()
        if not torch.equal(mine.isfinite(), finite):
            raise WrongError("not finite where the reference is, or the other way round")
        if not finite.any():
            continue
        mine, theirs = mine[finite].double(), theirs[finite].double()
        scale = max(theirs.abs().max().item(), 1e-3)
        largest = max(largest, (mine - theirs).abs().max().item() / scale)
    return largest


def _comparable(*runs: list[Tensor]) -> tuple[list[Tensor], ...]:
    """Without the maps that some models return unasked, if an attention function returns them."""
    if len({len(outputs) for outputs in runs}) == 1:
        return runs
    return tuple(
        [y for y in outputs if y.dim() != 4 or y.shape[-1] != y.shape[-2]] for outputs in runs
    )


def _agree(got: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    # where lengths are predicted, filters may change the shapes as well
    try:
        return difference(got, expected) <= tolerance
    except WrongError:
        return False


def gradient_differences(
    got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """Differences by name, relative to the largest number of the gradient.

    A gradient that is much smaller than the largest one of the model is measured by that: it may be
    a sum of large terms (of the keys' bias, say, whose gradient is zero but for rounding).
    """
    sizes = [
        g.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        for g in expected.values()
        if g is not None and g.numel()
    ]
    largest = max(sizes, default=0.0)
    found = {}
    for name, theirs in expected.items():
        mine = got[name]
        if (theirs is None) != (mine is None):
            raise WrongError(f"the gradient of {name} is missing on one side")
        if theirs is None or mine is None or not theirs.numel():
            continue
        if not torch.equal(mine.isfinite(), theirs.isfinite()):
            raise WrongError(f"the gradient of {name} is not finite where the reference's is")
        # rows without any key may be NaN in the model itself
        finite = theirs.isfinite()
        if not finite.any():
            continue
        mine, theirs = mine[finite].double(), theirs[finite].double()
        scale = max(theirs.abs().max().item(), 3e-2 * largest, 1e-30)
        found[name] = (mine - theirs).abs().max().item() / scale
    return found


def examine(entry: Entry) -> Verdict:
    """Everything that the census says of one entry."""
    verdict = Verdict(entry.name)
    try:
        try:
            subject = Subject(entry)
        except _NotRunnableError:
            # some models have float32 written into their code
            subject = Subject(entry, torch.float32)
    except TimeoutError:
        raise
    except Exception as error:
        verdict.findings["default"] = Finding("not built", _one_line(error))
        return verdict
    verdict.model = type(subject.model).__name__
    verdict.inputs = "+".join(subject.sources)
    verdict.findings["default"] = _guarded(subject, "default")
    planned = [_planned(subject, mode) for mode in ("default", "traced")]
    if planned[0] != planned[1]:
        verdict.findings["traced"] = _guarded(subject, "traced")
    return verdict


def _planned(subject: Subject, mode: Mode) -> dict[str, str]:
    with _adapters(subject.model, mode):
        try:
            return gfsa.plug(subject.model, dry_run=True, unknown=_unknown(mode)).how
        except ValueError:
            return {}


def _unknown(mode: Mode) -> Any:
    return "trace" if mode == "traced" else "refuse"


@contextlib.contextmanager
def _adapters(model: nn.Module, mode: Mode) -> Iterator[None]:
    """In the mode "traced", also modules that an adapter knows are traced."""
    before = dict(registry._registered)
    if mode == "traced":
        for name, module in model.named_modules():
            adapter = registry.find_adapter(module)
            if adapter is None or isinstance(adapter, TracerAdapter):
                continue
            with contextlib.suppress(Exception):
                if adapter.refusal(name, module) is None and TRACER.refusal(name, module) is None:
                    gfsa.register_adapter(type(module), TRACER)
    try:
        yield
    finally:
        registry._registered.clear()
        registry._registered.update(before)


def _guarded(subject: Subject, mode: Mode) -> Finding:
    """The finding of one mode; whatever goes wrong is part of it."""
    with _adapters(subject.model, mode):
        try:
            return _Check(subject, mode).finding()
        except TimeoutError:
            raise
        except NotSquareError as error:
            return Finding("wrong", f"{error}, and yet it was filtered")
        except WrongError as error:
            return Finding("wrong", str(error))
        except NoReferenceError as error:
            return Finding("no reference", str(error))
        except Exception as error:
            return Finding("crash", _one_line(error))


class _Check:
    def __init__(self, subject: Subject, mode: Mode) -> None:
        self.subject = subject
        self.mode: Mode = mode
        self.left_out: dict[str, str] = {}
        self.shapes: list[tuple[int, int]] = []
        """The (samples, length) that the model takes."""
        self.cache_refusal = ""
        self.error = 0.0

    def finding(self) -> Finding:
        self.refuse_unreported()
        try:
            report = self.plug(self.subject.build())[1]
        except ValueError as error:
            return Finding("refused", _one_line(error, 400))
        while True:
            try:
                return self.compared()
            except _LateRefusalError as late:
                self.left_out.update(late.modules)
                if all(name in self.left_out for name in report.plugged):
                    status: Any = "refused" if self.mode == "traced" else "raises later"
                    return Finding(status, late.reason, 0, 0, _hows(report))

    def plug(self, model: nn.Module) -> tuple[nn.Module, Any]:
        report = gfsa.plug(
            model,
            K=3,
            unknown=_unknown(self.mode),
            layers=lambda name, module: name not in self.left_out,
        )
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for filter in gfsa.filters_of(model).values():
                numbers = torch.randn(filter.theta.shape, generator=generator) * 0.3
                filter.theta.copy_(numbers)
        return model.to(self.subject.dtype), report

    def settle(self) -> None:
        """One forward, to know early which modules refuse it."""
        plugged = self.plug(self.subject.build())[0]
        with torch.no_grad(), contextlib.suppress(_AnotherShapeError, _CacheRefusalError):
            self.run_plugged(plugged, self.subject.uncached(*SHAPES[1]))

    def compared(self) -> Finding:
        self.settle()
        subject = self.subject
        plugged, report = self.plug(subject.build())
        thetas = {
            name: filter.theta.detach().clone() for name, filter in gfsa.filters_of(plugged).items()
        }
        self.refuse_without_powers(set(thetas))
        layouts = self.observe(thetas)
        reached: set[str] = set()
        refusals: list[str] = []
        expectations: list[tuple[Batch, list[Tensor], float]] = []
        self.shapes.clear()
        differs = False
        for number, (samples, length) in enumerate(SHAPES):
            batch = (subject.batch if number == 1 else subject.uncached)(samples, length)
            with torch.no_grad():
                try:
                    plain = run(subject.model, batch)
                except Exception:
                    # this length or number of samples is not for this model
                    continue
                tolerance = subject.tolerance(batch)
                try:
                    got = self.run_plugged(plugged, batch)
                except _CacheRefusalError as refusal:
                    self.cache_refusal = str(refusal)
                    batch = subject.uncached(samples, length)
                    got = self.run_plugged(plugged, batch)
                except _AnotherShapeError as refusal:
                    # a first forward that verifies nothing may be refused
                    refusals.append(str(refusal))
                    continue
                reference = DenseReference(subject.model, thetas, layouts)
                with reference.running():
                    expected = run(subject.model, batch)
            self.shapes.append((samples, length))
            expectations.append((batch, expected, tolerance))
            reached |= reference.reached
            self.judge(difference(got, expected), tolerance, f"{samples} samples of {length}")
            differs = differs or not _agree(got, plain, 100 * tolerance)
        if not self.shapes:
            raise WrongError(f"refused for every shape: {refusals}")
        if set(gfsa.filters_of(plugged)) != set(thetas):
            raise WrongError("the model has replaced modules that were plugged, filters included")
        if "tracer" in _hows(report):
            self.largest_batch_first(expectations)
        if reached and not differs:
            raise WrongError("the filters make no difference to the outputs")
        self.gradients(plugged, thetas, layouts)
        generation = ""
        if self.mode == "default":
            generation = self.generation(plugged, thetas, layouts)
            self.files(plugged)
        self.unplug(plugged)
        late = Counter(self.left_out.values())
        finding = Finding(
            "right",
            "",
            len(report.plugged),
            len(reached),
            _hows(report),
            self.error,
            dict(Counter(report.skipped.values())),
            generation,
        )
        if late:
            reasons = "; ".join(f"{count}× {reason}" for reason, count in late.items())
            finding.reason = f"refused in the first forward: {reasons}"
            if self.mode == "default":
                finding.status = "raises later"
        return finding

    def largest_batch_first(self, expectations: list[tuple[Batch, list[Tensor], float]]) -> None:
        """What a tracer concludes from its first forward must not depend on which one that is."""
        plugged = self.plug(self.subject.build())[0]
        for batch, expected, tolerance in reversed(expectations):
            with torch.no_grad(), contextlib.suppress(_AnotherShapeError):
                got = self.run_plugged(plugged, batch)
                self.judge(difference(got, expected), tolerance, "with the largest batch first")

    def refuse_without_powers(self, sites: set[str]) -> None:
        """Modules whose rows and columns are different tokens must not have a filter."""
        probe = TokenProbe(self.subject.model, sites)
        batch = self.subject.uncached(2, SHAPES[0][1])
        with probe.running():
            run(self.subject.model, batch)
        for name, why in probe.found.items():
            raise WrongError(f"{name} is plugged, but {why}")

    def observe(self, thetas: Mapping[str, Tensor]) -> dict[str, Layout]:
        """Where the heads of each plugged module are."""
        sites = set(thetas)
        before, after, corner = self.subject.observations
        layouts = {}
        for name, seen in before.items():
            site = _around(name, sites)
            if site is None or not seen.maps:
                continue
            maps = [other[name].maps[0] for other in (before, after, corner)]
            try:
                layouts[site] = layout_of(*maps, len(thetas[site]), OBSERVED)
            except NoReferenceError as error:
                raise NoReferenceError(f"{site}: {error}") from error
        return layouts

    def refuse_unreported(self) -> None:
        """Self-attention that the model computes must be plugged or skipped with a reason."""
        model = self.subject.model
        known = set(sites(model, _unknown(self.mode)))
        missing = [
            name
            for name in self.subject.observations[0]
            if _around(name, known) is None
            and not any(inner.startswith(f"{name}.") for inner in known)
        ]
        if missing:
            kinds = {type(model.get_submodule(name)).__name__ for name in missing}
            raise WrongError(
                f"self-attention that is neither plugged nor skipped: {missing[0]} and "
                f"{len(missing) - 1} more ({', '.join(sorted(kinds))})"
            )

    def run_plugged(self, plugged: nn.Module, batch: Batch) -> list[Tensor]:
        """A forward of the plugged model; a refusal names the modules to leave out."""
        stack: list[str] = []
        names = {id(m): name for name, m in plugged.named_modules() if hasattr(m, "gfsa")}
        handles = []
        for module in plugged.modules():
            if id(module) in names:
                name = names[id(module)]
                handles.append(
                    module.register_forward_pre_hook(
                        lambda m, a, name=name: stack.append(name), prepend=True
                    )
                )
                handles.append(module.register_forward_hook(lambda m, a, y: stack.clear()))
        try:
            return run(plugged, batch)
        except TimeoutError:
            raise
        except Exception as error:
            if not stack or not is_refusal(error):
                raise
            if self.subject.caches and "use_cache" not in batch and "use_cache=False" in str(error):
                raise _CacheRefusalError(_one_line(error)) from error
            if "run the first forward with another" in str(error).lower():
                raise _AnotherShapeError(_one_line(error)) from error
            at = stack[-1]
            reason = _one_line(error, 300).replace(at, "…")
            raise _LateRefusalError({at: reason}, reason) from error
        finally:
            for handle in handles:
                handle.remove()

    def judge(self, error: float, tolerance: float, what: str) -> None:
        self.error = max(self.error, error)
        if not error <= tolerance:
            raise WrongError(f"{what}: off by {error:.1e} (rounding: {tolerance:.0e})")

    def gradients(
        self,
        plugged: nn.Module,
        thetas: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
    ) -> None:
        """Gradients of θ, of the weights and of floating inputs."""
        model = self.subject.model
        leaves = {name: theta.clone().requires_grad_() for name, theta in thetas.items()}
        batches = []
        for _ in range(2):
            make = self.subject.uncached if self.cache_refusal else self.subject.batch
            batch = make(*self.shapes[-1])
            for x in batch.values():
                if isinstance(x, Tensor) and x.is_floating_point():
                    x.requires_grad_()
            batches.append(batch)
        for one in (model, plugged):
            one.zero_grad(set_to_none=True)
        reference = DenseReference(model, leaves, layouts)
        with reference.running():
            expected = run(model, batches[0])
        if not any(y.requires_grad for y in expected):
            return
        for outputs in _comparable(expected, run(plugged, batches[1])):
            loss_of(outputs).backward()
        mine = {name: p.grad for name, p in plugged.named_parameters()}
        theirs = {name: p.grad for name, p in model.named_parameters()}
        theirs |= {f"{name}.gfsa.theta": leaf.grad for name, leaf in leaves.items()}
        for name, x in batches[0].items():
            if isinstance(x, Tensor) and x.requires_grad:
                theirs[f"input {name}"], mine[f"input {name}"] = x.grad, batches[1][name].grad
        model.zero_grad(set_to_none=True)
        if set(mine) != set(theirs):
            raise WrongError(f"other parameters: {sorted(set(mine) ^ set(theirs))[:3]}")
        # a softmax that is asked to compute in float32 rounds its gradient once for every use of
        # the map, and the reference uses it more often
        tolerance = max(
            self.subject.gradient_tolerance, SINGLE_ROUNDING if self.subject.single else 0.0
        )
        for name, off in gradient_differences(mine, theirs).items():
            self.judge(off, tolerance, f"gradient of {name}")

    def generation(
        self, plugged: nn.Module, thetas: Mapping[str, Tensor], layouts: Mapping[str, Layout]
    ) -> str:
        """Decoding with a cache, against the reference without one."""
        model: Any = self.subject.model
        if "input_ids" not in self.subject.sources or not getattr(model, "can_generate", bool)():
            return ""
        if self.cache_refusal:
            return f"cache refused: {self.cache_refusal}"
        batch = self.subject.batch(1, 8)
        batch.pop("decoder_input_ids", None)
        with torch.no_grad():
            try:
                tokens, logits = _generated(model, batch)
                own = difference([logits], [_teacher_forced(model, batch, tokens)])
            except TimeoutError:
                raise
            except Exception as error:
                return f"not judged: {_one_line(error, 120)}"
            if own > MOST_ROUNDING[self.subject.dtype]:
                return "not judged: the model's own cache is not exact"
            try:
                tokens, logits = _generated(plugged, batch)
            except TimeoutError:
                raise
            except Exception as error:
                if is_refusal(error):
                    return f"cache refused: {_one_line(error, 200)}"
                raise WrongError(f"generate: {_one_line(error)}") from error
            reference = DenseReference(model, thetas, layouts)
            with reference.running():
                expected = _teacher_forced(model, batch, tokens)
            self.judge(
                difference([logits], [expected]),
                max(10 * self.subject.rounding, 100 * own),
                "decoding",
            )
        return "exact"

    def files(self, plugged: nn.Module) -> None:
        """What is saved and loaded into a fresh model gives the same outputs."""
        fresh = self.subject.build()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            gfsa.save(plugged, folder)
            gfsa.load(fresh, folder)
            fresh.to(self.subject.dtype)
            for shape in self.shapes:
                with contextlib.suppress(_AnotherShapeError):
                    batch = self.subject.uncached(*shape)
                    got = self.run_plugged(fresh, batch)
                    error = difference(got, run(plugged, batch))
                    self.judge(error, self.subject.rounding, "after loading")
                    return

    def unplug(self, plugged: nn.Module) -> None:
        """Keys, classes and outputs are as before."""
        model = self.subject.model
        gfsa.unplug(plugged)
        if list(plugged.state_dict()) != list(model.state_dict()):
            raise WrongError("state_dict keys differ after unplug")
        classes = {name: type(module).__qualname__ for name, module in model.named_modules()}
        for name, one in plugged.named_modules():
            # by name: torch makes a class of its own for each module with parametrized weights
            if type(one).__qualname__ != classes.get(name):
                raise WrongError(f"the class of {name} differs after unplug")
            if [key for key in one.__dict__ if "gfsa" in key]:
                raise WrongError(f"{name} keeps attributes of gfsa after unplug")
        batch = self.subject.uncached(*self.shapes[-1])
        with torch.no_grad():
            if difference(run(plugged, batch), run(model, batch)) > 0:
                raise WrongError("outputs differ after unplug")


class _CacheRefusalError(Exception):
    """gfsa asks for a forward without a cache."""


class _AnotherShapeError(Exception):
    """gfsa asks for another number of samples or tokens in the first forward."""


class _LateRefusalError(Exception):
    def __init__(self, modules: dict[str, str], reason: str) -> None:
        super().__init__(reason)
        self.modules = modules
        self.reason = reason


def is_refusal(error: BaseException) -> bool:
    """Whether gfsa itself raised the error, with words of its own."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = os.path.dirname(os.path.abspath(gfsa.__file__))
    return os.path.abspath(last).startswith(ours) and isinstance(
        error, ValueError | TypeError | NotImplementedError | TraceError
    )


def loss_of(outputs: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=torch.float64)
    for y in outputs:
        weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        # rows without any key may be NaN or infinite in the model itself
        total = total + (torch.where(y.isfinite(), y, 0).double() * weights).sum()
    return total


def _generated(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Tokens with their start, and the logits of each new one."""
    model.generation_config.eos_token_id = None
    start = {"decoder_start_token_id": 1} if model.config.is_encoder_decoder else {}
    out = model.generate(
        **batch,
        **start,
        max_new_tokens=4,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits, 1)


def _teacher_forced(model: Any, batch: Batch, tokens: Tensor) -> Tensor:
    """The logits of the same tokens in one forward without a cache."""
    batch = dict(batch)
    new = 4
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = tokens[:, :-1]
    else:
        batch["input_ids"] = tokens[:, :-1]
        if "attention_mask" in batch:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    logits: Tensor = model(**batch, use_cache=False).logits
    return logits[:, -new:]


def _around(name: str, known: set[str]) -> str | None:
    """The module itself, or the innermost one around it, that the report names."""
    while True:
        if name in known:
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]


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


def _hows(report: Any) -> str:
    return "; ".join(dict.fromkeys(report.how.values()))


def _one_line(error: BaseException, limit: int = 200) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
