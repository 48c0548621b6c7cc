"""Check one model: plugged by default and by tracing, against the dense reference.

Each model runs in float64 without dropout, with random filters, on several batch sizes (one sample,
and as many as it has heads, among them) and two lengths, all on one plugged instance: what the
first forward has verified must hold for the later ones. Then gradients, decoding with a cache,
saving and loading, and unplugging.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

import gfsa
from census import properties
from census.catalogue import Entry
from census.differences import WrongError, agree, difference
from census.inputs import Batch
from census.plugged import (
    AnotherShapeError,
    CacheRefusalError,
    Check,
    LateRefusalError,
    Mode,
    adapters,
    how_of,
    is_refusal,
    plan_of,
)
from census.reference import DenseReference, NoReferenceError, NotReachedError, NotSquareError
from census.subject import SHAPES, NotRunnableError, Subject, run
from census.verdict import Finding, Verdict, one_line


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
    planned = [plan_of(subject, mode) for mode in ("default", "traced")]
    if planned[0] != planned[1]:
        verdict.findings["traced"] = _guarded(subject, "traced")
    return verdict


def _guarded(subject: Subject, mode: Mode) -> Finding:
    """The finding of one mode; whatever goes wrong is part of it."""
    check = Check(subject, mode)
    with adapters(subject.model, mode):
        try:
            return finding_of(check)
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


def finding_of(check: Check) -> Finding:
    """Refused, or compared without the modules that refuse a forward."""
    check.refuse_unreported()
    try:
        report = check.plug(check.subject.build())[1]
    except ValueError as error:
        if not is_refusal(error):
            raise
        return Finding("refused", one_line(error, 400))
    check.how = how_of(report)
    if check.mode == "default":
        # even if these lengths are refused, equal ones may not be
        check.refuse_without_powers(set(report.plugged))
    status: Any = "refused" if check.mode == "traced" else "raises later"
    reason = ""
    while True:
        try:
            return compared(check)
        except LateRefusalError as late:
            check.left_out.update(late.modules)
            reason = late.reason
            if all(name in check.left_out for name in report.plugged):
                return Finding(status, reason, how=check.how)
        except NotReachedError:
            if not reason:
                raise
            # what the inputs reach has refused; the rest is a tower that they do not reach
            return Finding(status, reason, how=check.how)


def settle(check: Check) -> None:
    """One forward, to know early which modules refuse it."""
    plugged = check.plug(check.subject.build())[0]
    refusal = None
    for shape in SHAPES:
        try:
            with torch.no_grad():
                check.run_plugged(plugged, check.subject.uncached(*shape))
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


def compared(check: Check) -> Finding:
    """Every shape against the reference, on one plugged instance, then the other properties."""
    settle(check)
    subject = check.subject
    plugged, report = check.plug(subject.build())
    thetas = {
        name: filter.theta.detach().clone() for name, filter in gfsa.filters_of(plugged).items()
    }
    check.refuse_without_powers(set(thetas))
    layouts = check.observe(thetas)
    reached: set[str] = set()
    refusals: list[str] = []
    expectations: list[tuple[Batch, list[Tensor], float]] = []
    check.shapes.clear()
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
                got = check.run_plugged(plugged, batch)
            except CacheRefusalError as refusal:
                check.cache_refusal = str(refusal)
                batch = subject.uncached(samples, length)
                got = check.run_plugged(plugged, batch)
            except AnotherShapeError as refusal:
                # a first forward that verifies nothing may be refused
                refusals.append(str(refusal))
                continue
            reference = DenseReference(subject.model, thetas, layouts)
            with reference.running():
                expected = run(subject.model, batch)
        check.shapes.append((samples, length))
        expectations.append((batch, expected, tolerance))
        reached |= reference.reached
        check.judge(difference(got, expected), tolerance, f"{samples} samples of {length}")
        differs = differs or not agree(got, plain, 100 * tolerance)
    if not check.shapes:
        raise WrongError(f"refused for every shape: {refusals}")
    if len(check.shapes) + len(refusals) < 2:
        raise NoReferenceError(f"the model takes only (samples, length) of {check.shapes}")
    if not reached:
        raise NotReachedError("the inputs of the census reach none of the plugged layers")
    if set(gfsa.filters_of(plugged)) != set(thetas):
        raise WrongError("the model has replaced modules that were plugged, filters included")
    if "tracer" in how_of(report):
        properties.largest_batch_first(check, expectations)
    if not differs:
        raise WrongError("the filters make no difference to the outputs")
    properties.gradients(check, plugged, thetas, layouts)
    generation = ""
    if check.mode == "default":
        generation = properties.generation(check, plugged, thetas, layouts)
        properties.files(check, plugged)
    properties.unplug(check, plugged)
    late = Counter(check.left_out.values())
    finding = Finding(
        "right",
        "",
        len(report.plugged),
        len(reached),
        how_of(report),
        check.error,
        dict(Counter(report.skipped.values())),
        generation,
    )
    if late:
        reasons = "; ".join(f"{count}× {reason}" for reason, count in late.items())
        finding.reason = f"refused in the first forward: {reasons}"
        if check.mode == "default":
            finding.status = "raises later"
    return finding
