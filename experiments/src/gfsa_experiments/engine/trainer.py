"""The training loop that all recipes share."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import nn

from gfsa_experiments.engine.batches import StepBatches, in_order, loader_of
from gfsa_experiments.engine.checkpoints import (
    LoopCheckpoints,
    LoopState,
    checkpoint_is_due,
    isolated_generators,
)
from gfsa_experiments.engine.config import TrainConfig, as_text
from gfsa_experiments.engine.measure import Movement, Progress, RunLog, StepMeter
from gfsa_experiments.engine.step import (
    EagerStep,
    GraphedStep,
    WeightAverage,
    build_optimiser,
    compile_blocks,
    compile_model,
    forget_compiled,
    map_tensors,
    set_learning_rate,
    to_device,
)
from gfsa_experiments.engine.task import Task, sealed


def is_sharded(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def refuse_with_sharding(config: TrainConfig) -> None:
    """Raise for settings that keep whole copies of the weights, or replay a step."""
    for name in ("ema", "best", "patience", "graphs"):
        if getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)} needs all weights in one process, but FSDP shards "
                f"them: leave {name} out, or train without FSDP"
            )


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, split: str, config: TrainConfig, accelerator: Accelerator
) -> dict[str, float]:
    """The task's metrics on ``split``; several processes share the batches."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    data = task.splits[split]
    size = config.eval_batch_size or config.batch_size
    order = in_order(len(data), size, rank, processes)
    own = len(order)
    if is_sharded(accelerator):
        # the processes compute together: one that has a batch less repeats the first of all
        first, *_ = shares = in_order(len(data), size, 0, processes)
        order += [first] * (len(shares) - own)
    elif processes > 1:
        # in training each updates the statistics of its batch norms by its own share of a batch
        for buffer in filter(torch.is_floating_point, model.buffers()):
            torch.distributed.broadcast(buffer, src=0)
    loader = loader_of(data, order, config.workers, pin=accelerator.device.type == "cuda")
    was_training = model.training
    model.eval()
    try:
        predictions = []
        for batch in loader:
            with accelerator.autocast():
                predictions.append(task.predict(model, to_device(batch, accelerator.device)))
        predictions = map_tensors(lambda tensor: tensor.cpu(), predictions[:own])
    finally:
        model.train(was_training)
    if processes > 1:
        # the processes took the batches in turn
        shares = gather_object([predictions])
        longest = max(map(len, shares))
        predictions = [share[i] for i in range(longest) for share in shares if i < len(share)]
    scores = task.score(predictions)
    if task.metric not in scores:
        raise KeyError(
            f"the task reports {task.metric!r}, but its score() gave {', '.join(scores)}"
        )
    return {name: float(value) for name, value in scores.items()}


class Trainer:
    """Trains the model of a task; a killed run can be resumed.

    Metrics, logs and checkpoints go to ``folder``. :func:`build_optimiser` takes ``added`` and
    ``filter_lr``.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        accelerator: Accelerator,
        folder: Path,
        added: list[nn.Parameter],
        filter_lr: float | None = None,
    ) -> None:
        self.task, self.config, self.accelerator = task, config, accelerator
        if (config.patience or config.best) and "valid" not in task.splits:
            raise ValueError(
                "patience and best choose on the split 'valid', which this data set lacks; "
                "hold out a part of train (holdout=0.1, if the recipe has it)"
            )
        task.model.to(accelerator.device)
        self.bare_model = task.model
        self.movement = Movement(task.model)
        self.state = LoopState()
        optimiser = build_optimiser(task.model, added, config, filter_lr)
        self.average: WeightAverage | None = None
        if config.ema:
            self.average = WeightAverage(task.model, config.ema)
            accelerator.register_for_checkpointing(self.average)
        self.model, self.optimiser = accelerator.prepare(task.model, optimiser)
        compiles = self._compile()
        make_step = GraphedStep if config.graphs else EagerStep
        self.step = make_step(accelerator, self.model, self.optimiser, task.loss, config.clip)
        self._first_step_compiles = compiles or config.graphs
        self.log = RunLog(folder, self.state, accelerator)
        self.checkpoints = LoopCheckpoints(folder, accelerator, self.optimiser, self.state)
        self.meter = StepMeter(accelerator.device)
        self.batches = StepBatches(task, config, accelerator)
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.total = config.total_steps(self.steps_per_epoch)

    def _compile(self) -> bool:
        """Compile the model, or its blocks, as the settings want it; whether anything is."""
        compiled: str = self.config.compile
        if compiled == "auto":
            compiled = "blocks" if self.accelerator.device.type == "cuda" else "no"
        if compiled == "model":
            compile_model(self.model)
        elif compiled == "blocks":
            compile_blocks(self.bare_model)
        return compiled != "no"

    def fit(self, resume: bool = False, progress: Progress | None = None) -> dict[str, Any]:
        """Train to the end (from the last checkpoint if ``resume``) and evaluate."""
        try:
            with sealed(self.task.splits["test"]):
                valid = self._train_and_validate(resume, progress)
            test = self._evaluate("test")
            self._add_to_log(_prefixed("test", test))
            if self.state.rates:
                test |= self._speed(median(self.state.rates))
        finally:
            self.log.close()
        self.log.write()
        if self.average is not None:
            self.bare_model.load_state_dict(self.average.module.state_dict())
        # hooks that the caller adds afterwards are called in the uncompiled model only
        forget_compiled(self.bare_model)
        return self.columns(test, valid)

    def columns(
        self, test: dict[str, float] | None = None, valid: dict[str, float] | None = None
    ) -> dict[str, Any]:
        """The results in the run's row; without metrics those of a run that diverged."""
        at, metric = self.state, self.task.metric
        if test is None:
            test = {metric: math.nan}
            valid = test if "valid" in self.task.splits else None
        others = {name: round(value, 6) for name, value in test.items() if name != metric}
        return {
            "metric": metric,
            "higher_is_better": self.task.higher_is_better,
            "test": test[metric],
            "valid": valid[metric] if valid else None,
            "others": as_text(others),
            "moved": self.movement.mean(),
            "epochs": round(at.step / self.steps_per_epoch, 3),
            "steps": at.step,
            "seconds": round(at.seconds, 3),
            "seconds_per_step": median(at.rates) if at.rates else 0.0,
            "peak_memory_mib": self.meter.mib,
        }

    def _train_and_validate(
        self, resume: bool, progress: Progress | None
    ) -> dict[str, float] | None:
        """Everything before the test: the metrics on ``valid`` of the weights to report."""
        if resume:
            self.checkpoints.resume()
        falling = self.task.falling if "valid" in self.task.splits else None
        if falling is not None and not self.state.step:
            # a resumed run has it already; training draws the same numbers as without this
            with isolated_generators(0):
                self.state.start = self._evaluate("valid")[falling]
        self._train(progress)
        if self.state.best is not None:
            self.evaluated_model.load_state_dict(self.state.best)
        valid, start = self.state.valid, self.state.start
        # compared this way NaN has not fallen either
        if falling is None or start is None or valid is None or valid[falling] < start:
            return valid
        self.log.write()
        raise FloatingPointError(
            f"the {falling} on valid is {valid[falling]:.4g} at the end, and was {start:.4g} "
            "before the first step: training has diverged; a smaller lr (or filter_lr) or clip=1 "
            "may help"
        )

    @property
    def evaluated_model(self) -> nn.Module:
        """The average of the weights if there is one, the model otherwise."""
        if self.average is not None:
            return self.average.module
        # DistributedDataParallel synchronises in forward, and would wait for a process that has
        # no batch left
        distributed = isinstance(self.model, nn.parallel.DistributedDataParallel)
        return self.bare_model if distributed else self.model

    def _train(self, progress: Progress | None) -> None:
        config, at, meter = self.config, self.state, self.meter
        eval_steps = config.steps_between_evaluations(self.steps_per_epoch, self.total)
        self.model.train()
        # the first step compiles, which is set-up: it counts as the mean of the steps after it
        meter.begin(untimed=1 if self._first_step_compiles else 0)
        # a resumed run whose patience had run out has no steps left
        steps = iter(()) if at.stopped else self.batches.steps(at.step, self.total)
        for batch in steps:
            rate = set_learning_rate(self.optimiser, config, at.step, self.total)
            loss = self.step(batch)
            at.step += 1
            if self.average is not None:
                self.average.update(self.bare_model, at.step)
            meter.add(loss)
            done = at.step == self.total
            evaluates = "valid" in self.task.splits and (done or at.step % eval_steps == 0)
            saves = checkpoint_is_due(config, at.step, self.steps_per_epoch, self.total, evaluates)
            if not (evaluates or saves or done or at.step % config.log_every == 0):
                continue
            # only here the host waits for the device
            mean, seconds, pace = meter.read()
            at.seconds += seconds
            if pace is not None:
                at.rates.append(pace)
            if self.accelerator.num_processes > 1:
                # each has a share of every batch; all see a loss that is not finite, and end
                own = torch.tensor(mean, device=self.accelerator.device)
                mean = float(self.accelerator.reduce(own, "mean"))
            if not math.isfinite(mean):
                raise FloatingPointError(
                    f"the loss is {mean} at step {at.step}: training has diverged; "
                    "a smaller lr (or filter_lr), clip=1 or precision=fp32 may help"
                )
            text = self._log_step(mean, rate, pace, evaluates)
            if progress is not None:
                progress(text, evaluates)
            saves |= at.stopped and config.checkpoints
            if saves:
                self.checkpoints.save()
            if saves or evaluates:
                # whoever watches the run, or finds it killed, has the metrics so far
                self.log.write()
            if at.stopped:
                break
            meter.begin()

    def _log_step(
        self, loss: float, rate: float, seconds_per_step: float | None, evaluates: bool
    ) -> str:
        """Add the last steps to the log, with a validation if one is due; what to say of them."""
        at, metric = self.state, self.task.metric
        line = {"loss": loss, "lr": rate}
        said = [f"loss {loss:.4g}"]
        point: dict[str, float] = {"step": at.step}
        if self.task.tokens is not None:
            point["tokens"] = at.step * self.config.batch_size * self.task.tokens
            said.insert(0, f"{point['tokens']:,} tokens")
        if evaluates:
            scores = self._validate()
            line |= _prefixed("valid", scores)
            said.append(f"valid {metric} {scores[metric]:.4g}")
            point |= {"seconds": round(at.seconds, 3), f"valid {metric}": scores[metric]}
            at.curve.append(point)
        speed = self._speed(seconds_per_step)
        self._add_to_log(line, **speed)
        if speed:
            said.append(f"{speed['tokens_per_second']:,.0f} tokens/s")
        return f"step {at.step:,} of {self.total:,}, {', '.join(said)}"

    def _evaluate(self, split: str) -> dict[str, float]:
        return evaluate(self.task, self.evaluated_model, split, self.config, self.accelerator)

    def _validate(self) -> dict[str, float]:
        """Evaluate ``valid``, keep the best weights, and decide whether to stop."""
        config, scores = self.config, self._evaluate("valid")
        score = scores[self.task.metric]
        is_best = self.state.judge(score, self.task.higher_is_better, config.patience)
        if is_best and (config.best or config.patience):
            weights = self.evaluated_model.state_dict()
            self.state.best = {name: tensor.detach().clone() for name, tensor in weights.items()}
        if is_best or self.state.best is None:
            self.state.valid = scores
        return scores

    def _add_to_log(self, values: dict[str, float], **beside: float) -> None:
        moved = {"filters/moved": self.movement.mean()}
        self.log.add(self.state.step, values, **beside, **moved)

    def _speed(self, seconds_per_step: float | None) -> dict[str, float]:
        """Tokens per second, where examples have a number of tokens."""
        if self.task.tokens is None or seconds_per_step is None:
            return {}
        tokens = self.task.tokens * self.config.batch_size
        return {"tokens_per_second": round(tokens / seconds_per_step)}


def _prefixed(split: str, scores: dict[str, float]) -> dict[str, float]:
    return {f"{split}/{name}": value for name, value in scores.items()}
