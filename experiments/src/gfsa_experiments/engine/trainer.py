"""The training loop that all recipes share."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import nn

from gfsa.lens.trajectory import Trajectory
from gfsa_experiments.engine.batches import StepBatches, evaluation_loader, in_order
from gfsa_experiments.engine.checkpoints import (
    LoopCheckpoints,
    LoopState,
    checkpoint_is_due,
    isolated_generators,
)
from gfsa_experiments.engine.compiling import compile_blocks, compile_model, forget_compiled
from gfsa_experiments.engine.config import TrainConfig
from gfsa_experiments.engine.measure import (
    Movement,
    Pace,
    PeakMemory,
    Progress,
    Report,
    RunLog,
    StepMeter,
    peak_flops,
    speed,
    warn_of_unknown_peak,
)
from gfsa_experiments.engine.optimiser import WeightAverage, build_optimiser, set_learning_rate
from gfsa_experiments.engine.step import EagerStep, GraphedStep, map_tensors, to_device
from gfsa_experiments.engine.task import Task, sealed


def is_sharded(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def share_buffers(model: nn.Module) -> None:
    """Give every process the buffers of the first one; every process calls this.

    In training each updates the statistics of its batch norms by its own share of a batch.
    """
    for buffer in model.buffers():
        if buffer.is_floating_point():
            torch.distributed.broadcast(buffer, src=0)


def refuse_with_sharding(config: TrainConfig) -> None:
    """Raise for settings that keep whole copies of the weights, or replay a step."""
    for name in ("ema", "best", "patience", "graphs"):
        if getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)} needs all weights in one process, but FSDP shards "
                f"them: leave {name} out, or train without FSDP"
            )


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The weights of a sharded model on the host of the first process; every process calls this.

    Other processes get an empty dict.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(model, options=options))


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
    loader = evaluation_loader(data, order, config.workers, pin=accelerator.device.type == "cuda")
    was_training = model.training
    model.eval()
    try:
        predictions = []
        for batch in loader:
            with accelerator.autocast():
                predicted = task.predict(model, to_device(batch, accelerator.device))
            predictions.append(predicted)
        predictions = predictions[:own]
        predictions = map_tensors(lambda tensor: tensor.cpu(), predictions)
    finally:
        model.train(was_training)
    if processes > 1:
        predictions = _in_order(gather_object([predictions]))
    scores = task.score(predictions)
    if task.metric not in scores:
        raise KeyError(
            f"the task reports {task.metric!r}, but its score() gave {', '.join(scores)}"
        )
    return {name: float(value) for name, value in scores.items()}


def _in_order(shares: list[list[Any]]) -> list[Any]:
    """The batches of all processes, which took them in turn, in their original order."""
    longest = max(len(share) for share in shares)
    return [share[i] for i in range(longest) for share in shares if i < len(share)]


@dataclass
class Outcome:
    """The metrics and the cost of a run."""

    test: dict[str, float]
    valid: dict[str, float] | None
    moved: float | None
    epochs: float
    steps: int
    seconds: float
    seconds_per_step: float
    peak_memory_mib: float | None


class Trainer:
    """Trains the model of a task; a killed run can be resumed.

    Args:
        task: model, data, loss and metrics.
        config: how to train.
        accelerator: devices and precision.
        folder: where metrics, logs and checkpoints go.
        added: parameters that a method added to the model.
        filter_lr: their learning rate; None for the model's.
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
        self.task, self.config, self.accelerator, self.folder = task, config, accelerator, folder
        if (config.patience or config.best) and "valid" not in task.splits:
            raise ValueError(
                "patience and best choose on the split 'valid', which this data set lacks; "
                "hold out a part of train (holdout=0.1, if the recipe has it)"
            )
        task.model.to(accelerator.device)
        self.bare_model = task.model
        self.movement = Movement(task.model)
        self.state = LoopState(Trajectory())
        # before the model is wrapped or sharded
        self.state.trajectory.record(task.model, 0)
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
        self.log = RunLog(folder, accelerator.is_main_process)
        self.checkpoints = LoopCheckpoints(folder, accelerator, self.optimiser, self.log)
        self.batches = StepBatches(task, config, accelerator)
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.total = config.total_steps(self.steps_per_epoch)
        self._peak_memory = PeakMemory(accelerator.device)
        found = peak_flops(accelerator.device)
        if task.work is not None and accelerator.is_main_process:
            warn_of_unknown_peak(accelerator.device)
        self._peak_flops = None if found is None else found * accelerator.num_processes

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

    def fit(self, resume: bool = False, progress: Progress | None = None) -> Outcome:
        """Train to the end (from the last checkpoint, if ``resume``) and evaluate."""
        if self.config.tensorboard:
            self.log.open_tensorboard()
        try:
            with sealed(self.task.splits["test"]):
                valid = self._train_and_validate(resume, progress)
            test = self._evaluate("test")
            self._add_to_log({"step": self.state.step} | _prefixed("test", test))
            if self.state.rates:
                test |= self._speed(median(self.state.rates))
        finally:
            self.log.close()
        self.log.write_metrics()
        self.log.write_curve(self.state.curve)
        self.log.write_coefficients(self.state.trajectory)
        if self.average is not None:
            self.bare_model.load_state_dict(self.average.module.state_dict())
        # hooks that the caller adds afterwards are called in the uncompiled model only
        forget_compiled(self.bare_model)
        return self._outcome(test, valid)

    def _train_and_validate(
        self, resume: bool, progress: Progress | None
    ) -> dict[str, float] | None:
        """Everything before the test: the metrics on ``valid`` of the weights to report."""
        if resume:
            self.state = self.checkpoints.resume(self.state)
        self._measure_start()
        self._peak_memory.start()
        self._train(progress)
        self._peak_memory.stop()
        if self.movement.mean() == 0.0 and self.accelerator.is_main_process:
            warnings.warn(
                f"{self.folder}: no filter has moved in {self.state.step} steps: their "
                "learning rate is 0, or no gradient reaches them; the row says nothing about "
                "filters",
                stacklevel=3,
            )
        if self.state.best is not None:
            self.evaluated_model.load_state_dict(self.state.best)
        valid = self._final_valid()
        self._refuse_breakdown(valid)
        return valid

    def _final_valid(self) -> dict[str, float] | None:
        """The metrics of the reported weights on ``valid``."""
        if "valid" not in self.task.splits:
            return None
        at = self.state.best_step if self.state.best is not None else self.state.step
        for line in self.log.history:
            if line["step"] == at and f"valid/{self.task.metric}" in line:
                found = {k: v for k, v in line.items() if k.startswith("valid/")}
                return {name.removeprefix("valid/"): value for name, value in found.items()}
        return self._evaluate("valid")

    def diverged_outcome(self) -> Outcome:
        """The outcome of a run whose loss is not finite, or did not fall."""
        undefined = {self.task.metric: math.nan}
        return self._outcome(undefined, undefined if "valid" in self.task.splits else None)

    def _outcome(self, test: dict[str, float], valid: dict[str, float] | None) -> Outcome:
        return Outcome(
            test=test,
            valid=valid,
            moved=self.movement.mean(),
            epochs=round(self.state.step / self.steps_per_epoch, 3),
            steps=self.state.step,
            seconds=self.state.seconds,
            seconds_per_step=median(self.state.rates) if self.state.rates else 0.0,
            peak_memory_mib=self._peak_memory.mib,
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
        config, at = self.config, self.state
        eval_steps = config.steps_between_evaluations(self.steps_per_epoch, self.total)
        last = at.step
        self.model.train()
        if at.stopped:
            # a resumed run whose patience had run out
            return
        # the first step compiles, which is set-up: it counts as the mean of the steps after it
        meter = StepMeter(self.accelerator.device, untimed=1 if self._first_step_compiles else 0)
        for batches in self.batches.steps(at.step, self.total):
            rate = set_learning_rate(self.optimiser, config, at.step, self.total)
            loss = self.step(batches)
            at.step += 1
            if self.average is not None:
                self.average.update(self.bare_model, at.step)
            meter.add(loss)
            done = at.step == self.total
            due = done or at.step % eval_steps == 0
            if due:
                at.trajectory.record(self.bare_model, at.step)
            evaluates = "valid" in self.task.splits and due
            saves = checkpoint_is_due(
                config, at.step, self.steps_per_epoch, self.total, last, evaluates
            )
            if not (evaluates or saves or done or at.step % config.log_every == 0):
                continue
            # only here the host waits for the device
            pace = self._of_all_processes(meter.read())
            at.seconds += pace.seconds
            if pace.seconds_per_step is not None:
                at.rates.append(pace.seconds_per_step)
            self._refuse_divergence(pace.loss)
            report = self._log_step(pace, rate, evaluates)
            if evaluates:
                # whoever watches the run, or finds it killed, has the metrics so far
                self.log.write_metrics()
            if progress is not None:
                progress(report)
            if saves or (at.stopped and config.checkpoints):
                self.checkpoints.save(at)
                last = at.step
            if at.stopped:
                break
            meter.restart()

    def _of_all_processes(self, pace: Pace) -> Pace:
        """The mean loss over the processes, each of which has a share of every batch.

        So all of them see a loss that is not finite, and end together.
        """
        if self.accelerator.num_processes == 1:
            return pace
        loss = torch.tensor(pace.loss, device=self.accelerator.device)
        return pace._replace(loss=float(self.accelerator.reduce(loss, "mean")))

    def _log_step(self, pace: Pace, rate: float, evaluates: bool) -> Report:
        """Add the last steps to the log, with a validation if one is due."""
        scores = None
        line = {"step": self.state.step, "loss": pace.loss, "lr": rate}
        if evaluates:
            # the memory of evaluation does not count: its batches may be larger
            self._peak_memory.stop()
            scores = self._validate()
            line |= _prefixed("valid", scores)
            self._add_to_curve(scores)
            self._peak_memory.start()
        step_speed = {} if pace.seconds_per_step is None else self._speed(pace.seconds_per_step)
        self._add_to_log(line, step_speed)
        metric = self.task.metric
        return Report(
            self.state.step,
            self.total,
            pace.loss,
            self._tokens(),
            metric,
            None if scores is None else scores[metric],
            step_speed,
        )

    def _evaluate(self, split: str) -> dict[str, float]:
        if self.accelerator.num_processes > 1 and not is_sharded(self.accelerator):
            share_buffers(self.evaluated_model)
        return evaluate(self.task, self.evaluated_model, split, self.config, self.accelerator)

    def _validate(self) -> dict[str, float]:
        """Evaluate ``valid``, keep the best weights, and decide whether to stop."""
        config, scores = self.config, self._evaluate("valid")
        score = scores[self.task.metric]
        is_best = self.state.judge(score, self.task.higher_is_better, config.patience)
        if is_best and (config.best or config.patience):
            weights = self.evaluated_model.state_dict()
            self.state.best = {name: tensor.detach().clone() for name, tensor in weights.items()}
        return scores

    def _refuse_divergence(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} at step {self.state.step}: training has diverged; "
                "a smaller lr (or filter_lr), clip=1 or precision=fp32 may help"
            )

    def _measure_start(self) -> None:
        """Measure the task's falling metric before the first step; a resumed run has it already."""
        name = self.task.falling
        if name is None or self.state.step or "valid" not in self.task.splits:
            return
        # training draws the same numbers as without this
        with isolated_generators(0):
            self.state.start = self._evaluate("valid")[name]

    def _refuse_breakdown(self, valid: dict[str, float] | None) -> None:
        """Raise FloatingPointError if the falling metric has not fallen."""
        name, start = self.task.falling, self.state.start
        # compared this way NaN has not fallen either
        if name is None or start is None or valid is None or valid[name] < start:
            return
        self.log.write_metrics()
        self.log.write_curve(self.state.curve)
        raise FloatingPointError(
            f"the {name} on valid is {valid[name]:.4g} at the end, and was {start:.4g} before the "
            "first step: training has diverged; a smaller lr (or filter_lr) or clip=1 may help"
        )

    def _add_to_log(self, line: dict[str, Any], beside: dict[str, float] | None = None) -> None:
        self.log.add(line, **(beside or {}), **{"filters/moved": self.movement.mean()})

    def _speed(self, seconds_per_step: float) -> dict[str, float]:
        """Tokens per second and MFU of a step, if the task declares its work per example."""
        work = self.task.work
        if work is None:
            return {}
        return speed(work, self.config.batch_size / seconds_per_step, self._peak_flops)

    def _tokens(self) -> int | None:
        """How many tokens were trained on so far, if the task declares its work per example."""
        work = self.task.work
        return None if work is None else self.state.step * self.config.batch_size * work.tokens

    def _add_to_curve(self, scores: dict[str, float]) -> None:
        """Append a validation to the curve: step, tokens, seconds of training, metric."""
        at, tokens = self.state, self._tokens()
        point: dict[str, float] = {"step": at.step}
        if tokens is not None:
            point["tokens"] = tokens
        metric = self.task.metric
        at.curve.append(
            point | {"seconds": round(at.seconds, 3), f"valid {metric}": scores[metric]}
        )


def _prefixed(split: str, scores: dict[str, float]) -> dict[str, float]:
    return {f"{split}/{name}": value for name, value in scores.items()}
