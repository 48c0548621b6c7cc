"""Check one model: plugged by default and by tracing, against the dense reference.

Each model runs in float64 without dropout, with random filters, on several batch sizes (one sample,
and as many as it has heads, among them) and two lengths, all on one plugged instance: what the
first forward has verified must hold for the later ones. Then gradients, decoding with a cache,
saving and loading, and unplugging.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gfsa
from census.catalogue import Entry
from census.decoding import generated, teacher_forced
from census.differences import (
    WrongError,
    agree,
    comparable,
    difference,
    gradient_differences,
    loss_of,
)
from census.inputs import Batch
from census.reference import (
    DenseReference,
    Layout,
    NoReferenceError,
    NotReachedError,
    NotSquareError,
    layout_of,
)
from census.refusals import AnotherShapeError, CacheRefusalError, LateRefusalError, is_refusal
from census.subject import (
    MOST_ROUNDING,
    OBSERVED,
    SHAPES,
    SINGLE_ROUNDING,
    NotRunnableError,
    Subject,
    run,
)
from census.tokens import TokenProbe
from census.verdict import Finding, Verdict, one_line
from gfsa.plugs import registry
from gfsa.plugs.sites import sites
from gfsa.plugs.tracing.adapter import TRACER, TracerAdapter

Mode = Literal["default", "traced"]

# classes with as many windows as heads in some layer, read in their code
READ_LAYOUTS = {"LocallyGroupedAttn": Layout(-3), "MaskUnitAttention": Layout(-4)}


def examine(entry: Entry) -> Verdict:
    """Everything that the census says of one entry."""
    verdict = Verdict(entry.name)
    try:
        try:
            subject = Subject(entry)
        except NotRunnableError:
            # some models have float32 written into their code
            subject = Subject(entry, torch.float32)
    except TimeoutError:
        raise
    except Exception as error:
        verdict.findings["default"] = Finding("not built", one_line(error))
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
    check = _Check(subject, mode)
    with _adapters(subject.model, mode):
        try:
            return check.finding()
        except TimeoutError:
            raise
        except NotSquareError as error:
            return Finding("wrong", f"{error}, and yet it was filtered", how=check.how)
        except WrongError as error:
            return Finding("wrong", str(error), how=check.how)
        except (NoReferenceError, NotReachedError) as error:
            return Finding("no reference", str(error), how=check.how)
        except Exception as error:
            return Finding("crash", one_line(error), how=check.how)


class _Check:
    def __init__(self, subject: Subject, mode: Mode) -> None:
        self.subject = subject
        self.mode: Mode = mode
        self.left_out: dict[str, str] = {}
        self.shapes: list[tuple[int, int]] = []
        """The (samples, length) that the model takes."""
        self.cache_refusal = ""
        self.how = ""
        self.error = 0.0

    def finding(self) -> Finding:
        self.refuse_unreported()
        try:
            report = self.plug(self.subject.build())[1]
        except ValueError as error:
            if not is_refusal(error):
                raise
            return Finding("refused", one_line(error, 400))
        self.how = _hows(report)
        if self.mode == "default":
            # even if these lengths are refused, equal ones may not be
            self.refuse_without_powers(set(report.plugged))
        status: Any = "refused" if self.mode == "traced" else "raises later"
        reason = ""
        while True:
            try:
                return self.compared()
            except LateRefusalError as late:
                self.left_out.update(late.modules)
                reason = late.reason
                if all(name in self.left_out for name in report.plugged):
                    return Finding(status, reason, how=self.how)
            except NotReachedError:
                if not reason:
                    raise
                # what the inputs reach has refused; the rest is a tower that they do not reach
                return Finding(status, reason, how=self.how)

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
        refusal = None
        for shape in SHAPES:
            try:
                with torch.no_grad():
                    self.run_plugged(plugged, self.subject.uncached(*shape))
                return
            except AnotherShapeError as error:
                refusal = error
            except LateRefusalError:
                raise
            except Exception:
                # this shape is not for this model, plugged or not
                continue
        if refusal is not None:
            raise LateRefusalError({refusal.site: str(refusal)}, str(refusal))

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
                except CacheRefusalError as refusal:
                    self.cache_refusal = str(refusal)
                    batch = subject.uncached(samples, length)
                    got = self.run_plugged(plugged, batch)
                except AnotherShapeError as refusal:
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
            differs = differs or not agree(got, plain, 100 * tolerance)
        if not self.shapes:
            raise WrongError(f"refused for every shape: {refusals}")
        if len(self.shapes) + len(refusals) < 2:
            raise NoReferenceError(f"the model takes only (samples, length) of {self.shapes}")
        if not reached:
            raise NotReachedError("the inputs of the census reach none of the plugged layers")
        if set(gfsa.filters_of(plugged)) != set(thetas):
            raise WrongError("the model has replaced modules that were plugged, filters included")
        if "tracer" in _hows(report):
            self.largest_batch_first(expectations)
        if not differs:
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
            with torch.no_grad(), contextlib.suppress(AnotherShapeError):
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
                kind = type(self.subject.model.get_submodule(site)).__name__
                if kind not in READ_LAYOUTS:
                    raise NoReferenceError(f"{site}: {error}") from error
                layouts[site] = READ_LAYOUTS[kind]
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
                raise CacheRefusalError(one_line(error)) from error
            if "run the first forward with another" in str(error).lower():
                raise AnotherShapeError(one_line(error), stack[-1]) from error
            at = stack[-1]
            reason = one_line(error, 300).replace(at, "…")
            raise LateRefusalError({at: reason}, reason) from error
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
        for outputs in comparable(expected, run(plugged, batches[1])):
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
                tokens, logits = generated(model, batch)
                own = difference([logits], [teacher_forced(model, batch, tokens)])
            except TimeoutError:
                raise
            except Exception as error:
                return f"not judged: {one_line(error, 120)}"
            if own > MOST_ROUNDING[self.subject.dtype]:
                return "not judged: the model's own cache is not exact"
            try:
                tokens, logits = generated(plugged, batch)
            except TimeoutError:
                raise
            except Exception as error:
                if is_refusal(error):
                    return f"cache refused: {one_line(error, 200)}"
                raise WrongError(f"generate: {one_line(error)}") from error
            reference = DenseReference(model, thetas, layouts)
            with reference.running():
                expected = teacher_forced(model, batch, tokens)
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
                with contextlib.suppress(AnotherShapeError):
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


def _around(name: str, known: set[str]) -> str | None:
    """The module itself, or the innermost one around it, that the report names."""
    while True:
        if name in known:
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]


def _hows(report: Any) -> str:
    return "; ".join(dict.fromkeys(report.how.values()))
