"""What must hold of a plugged model beside its outputs: gradients, decoding, files, unplugging."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import gfsa
from census.differences import (
    WrongError,
    comparable,
    difference,
    gradient_differences,
    loss_of,
)
from census.inputs import Batch
from census.plugged import AnotherShapeError, Check, is_refusal
from census.reference import DenseReference, Layout
from census.subject import MOST_ROUNDING, SINGLE_ROUNDING, run
from census.verdict import one_line

NEW_TOKENS = 4


def largest_batch_first(
    check: Check, expectations: list[tuple[Batch, list[Tensor], float]]
) -> None:
    """What a tracer concludes from its first forward must not depend on which one that is."""
    plugged = check.plug(check.subject.build())[0]
    for batch, expected, tolerance in reversed(expectations):
        with torch.no_grad(), contextlib.suppress(AnotherShapeError):
            got = check.run_plugged(plugged, batch)
            check.judge(difference(got, expected), tolerance, "with the largest batch first")


def gradients(
    check: Check,
    plugged: nn.Module,
    thetas: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
) -> None:
    """Gradients of θ, of the weights and of floating inputs."""
    model = check.subject.model
    leaves = {name: theta.clone().requires_grad_() for name, theta in thetas.items()}
    batches = []
    for _ in range(2):
        make = check.subject.uncached if check.cache_refusal else check.subject.batch
        batch = make(*check.shapes[-1])
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
        check.subject.gradient_tolerance, SINGLE_ROUNDING if check.subject.single else 0.0
    )
    for name, off in gradient_differences(mine, theirs).items():
        check.judge(off, tolerance, f"gradient of {name}")


def generated(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Tokens with their start, and the logits of each new one."""
    model.generation_config.eos_token_id = None
    start = {"decoder_start_token_id": 1} if model.config.is_encoder_decoder else {}
    out = model.generate(
        **batch,
        **start,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits, 1)


def teacher_forced(model: Any, batch: Batch, tokens: Tensor) -> Tensor:
    """The logits of the same tokens in one forward without a cache."""
    batch = dict(batch)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = tokens[:, :-1]
    else:
        batch["input_ids"] = tokens[:, :-1]
        if "attention_mask" in batch:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    logits: Tensor = model(**batch, use_cache=False).logits
    return logits[:, -NEW_TOKENS:]


def generation(
    check: Check, plugged: nn.Module, thetas: Mapping[str, Tensor], layouts: Mapping[str, Layout]
) -> str:
    """Decoding with a cache, against the reference without one."""
    model: Any = check.subject.model
    if "input_ids" not in check.subject.sources or not getattr(model, "can_generate", bool)():
        return ""
    if check.cache_refusal:
        return f"cache refused: {check.cache_refusal}"
    batch = check.subject.batch(1, 8)
    batch.pop("decoder_input_ids", None)
    with torch.no_grad():
        try:
            tokens, logits = generated(model, batch)
            own = difference([logits], [teacher_forced(model, batch, tokens)])
        except TimeoutError:
            raise
        except Exception as error:
            return f"not judged: {one_line(error, 120)}"
        if own > MOST_ROUNDING[check.subject.dtype]:
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
        check.judge(
            difference([logits], [expected]),
            max(10 * check.subject.rounding, 100 * own),
            "decoding",
        )
    return "exact"


def files(check: Check, plugged: nn.Module) -> None:
    """What is saved and loaded into a fresh model gives the same outputs."""
    fresh = check.subject.build()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        gfsa.save(plugged, folder)
        gfsa.load(fresh, folder)
        fresh.to(check.subject.dtype)
        for shape in check.shapes:
            with contextlib.suppress(AnotherShapeError):
                batch = check.subject.uncached(*shape)
                got = check.run_plugged(fresh, batch)
                error = difference(got, run(plugged, batch))
                check.judge(error, check.subject.rounding, "after loading")
                return


def unplug(check: Check, plugged: nn.Module) -> None:
    """Keys, classes and outputs are as before."""
    model = check.subject.model
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
    batch = check.subject.uncached(*check.shapes[-1])
    with torch.no_grad():
        if difference(run(plugged, batch), run(model, batch)) > 0:
            raise WrongError("outputs differ after unplug")
