"""The training loop that all recipes share."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

import gfsa
from gfsa.recipes.average import WeightAverage
from gfsa.recipes.batches import EpochBatches, training_loader
from gfsa.recipes.checkpoints import checkpoints, read_state, write_checkpoint
from gfsa.recipes.compiling import compile_blocks, compile_model, forget_compiled
from gfsa.recipes.config import TrainConfig
from gfsa.recipes.evaluate import evaluate
from gfsa.recipes.folder import write_curve, write_metrics
from gfsa.recipes.log import Log
from gfsa.recipes.optimiser import build_optimiser, set_learning_rate
from gfsa.recipes.randomness import load_randomness, save_randomness
from gfsa.recipes.speed import peak_flops, speed
from gfsa.recipes.step import EagerStep, GraphedStep
from gfsa.recipes.task import Task
from gfsa.recipes.tree import to_device

_BEST = "best.pt"


@dataclass
class Outcome:
    """What came out of training."""

    test: dict[str, float]
    valid: dict[str, float] | None
    moved: float | None
    epochs: float
    steps: int
    seconds: float
    seconds_per_step: float
    peak_memory_mib: float | None


@dataclass
class _Position:
    """Where the loop is; all of it goes into a checkpoint."""

    step: int = 0
    seconds: float = 0.0
    best_score: float | None = None
    best_step: int = 0
    worse: int = 0
    stopped: bool = False
    curve: list[dict[str, float]] = field(default_factory=list)
    """What ``valid`` said so far, with the tokens and the seconds that it took."""


class Trainer:
    """Trains the model of a task, and can be killed and asked to go on.

    Args:
        task: model, data, loss and measure.
        config: how to train.
        accelerator: devices and precision.
        folder: where metrics, logs and checkpoints go.
        added: parameters that a method put into the model.
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
                "split some of train off (holdout=0.1, if the recipe has it)"
            )
        task.model.to(accelerator.device)
        self.bare_model = task.model
        self._start = {name: f.theta.detach().clone() for name, f in _learning(task.model)}
        optimiser = build_optimiser(task.model, added, config, filter_lr)
        self.average: WeightAverage | None = None
        if config.ema:
            self.average = WeightAverage(task.model, config.ema)
            accelerator.register_for_checkpointing(self.average)
        self.model, self.optimiser = accelerator.prepare(task.model, optimiser)
        compiled: str = config.compile
        if compiled == "auto":
            compiled = "blocks" if accelerator.device.type == "cuda" else "no"
        if compiled == "model":
            compile_model(self.model)
        elif compiled == "blocks":
            compile_blocks(self.bare_model)
        make_step = GraphedStep if config.graphs else EagerStep
        self.step = make_step(accelerator, self.model, self.optimiser, task.loss, config.clip)
        self._compiles = compiled != "no" or config.graphs
        self.position = _Position()
        self.history: list[dict[str, Any]] = []
        self._best: dict[str, Tensor] | None = None
        self.steps_per_epoch = self._batches(0, 0).steps()
        if not self.steps_per_epoch:
            raise ValueError(
                f"{len(task.splits['train'])} examples make no batch of {config.batch_size}; "
                "set a smaller batch_size or drop_last=false"
            )
        self.total = config.max_steps or math.ceil(config.epochs * self.steps_per_epoch)
        self._rates: list[float] = []
        self._peak = 0
        found = peak_flops(accelerator.device)
        self._peak_flops = None if found is None else found * accelerator.num_processes

    def fit(
        self, resume: bool = False, progress: Callable[[int, int, str], None] | None = None
    ) -> Outcome:
        """Train to the end (from the last checkpoint, if asked) and measure."""
        if resume:
            self._resume()
        self._begin_memory()
        log = Log(self.folder, self.config.tensorboard and self.accelerator.is_main_process)
        try:
            self._train(log, progress)
            self._take_memory()
            if self._moved() == 0.0 and self.accelerator.is_main_process:
                warnings.warn(
                    f"{self.folder}: no filter has moved in {self.position.step} steps: their "
                    "learning rate is 0, or no gradient reaches them; the row says nothing about "
                    "filters",
                    stacklevel=2,
                )
            if self._best is not None:
                self.judged.load_state_dict(self._best)
            valid = self._final_valid()
            test = self._measure("test")
            self._note(log, {"step": self.position.step} | _named("test", test))
            if self._rates:
                test |= self._speed(median(self._rates))
        finally:
            log.close()
        if self.accelerator.is_main_process:
            write_metrics(self.folder, self.history)
            if self.position.curve:
                write_curve(self.folder, self.position.curve)
        if self.average is not None:
            self.bare_model.load_state_dict(self.average.module.state_dict())
        # who looks into the model afterwards finds it as it was built
        forget_compiled(self.bare_model)
        return self._outcome(test, valid)

    def _final_valid(self) -> dict[str, float] | None:
        """What ``valid`` says of the weights that are reported."""
        if "valid" not in self.task.splits:
            return None
        at = self.position.best_step if self._best is not None else self.position.step
        for line in self.history:
            if line["step"] == at and f"valid/{self.task.metric}" in line:
                found = {k: v for k, v in line.items() if k.startswith("valid/")}
                return {name.removeprefix("valid/"): value for name, value in found.items()}
        return self._measure("valid")

    def failure(self) -> Outcome:
        """The outcome of a run that came to nothing."""
        nothing = {self.task.metric: math.nan}
        return self._outcome(nothing, nothing if "valid" in self.task.splits else None)

    def _outcome(self, test: dict[str, float], valid: dict[str, float] | None) -> Outcome:
        return Outcome(
            test=test,
            valid=valid,
            moved=self._moved(),
            epochs=round(self.position.step / self.steps_per_epoch, 3),
            steps=self.position.step,
            seconds=self.position.seconds,
            seconds_per_step=median(self._rates) if self._rates else 0.0,
            peak_memory_mib=round(self._peak / 2**20, 1) if self._peak else None,
        )

    @property
    def judged(self) -> nn.Module:
        """The model that is evaluated: the average, if there is one."""
        if self.average is not None:
            return self.average.module
        # a wrapper that speaks to other processes would wait for one that has no batch
        alone = isinstance(self.model, nn.parallel.DistributedDataParallel)
        return self.bare_model if alone else self.model

    def _train(self, log: Log, progress: Callable[[int, int, str], None] | None) -> None:
        config, at = self.config, self.position
        eval_steps = config.steps_between_evaluations(self.steps_per_epoch, self.total)
        save_steps = config.checkpoint_every or self.steps_per_epoch
        self.model.train()
        losses = torch.zeros((), device=self.accelerator.device)
        counted, since = 0, time.perf_counter()
        # compiling is set-up: the step that does it counts as the next ones take
        untimed = 1 if self._compiles else 0
        for batches in self._stream():
            rate = set_learning_rate(self.optimiser, config, at.step, self.total)
            losses += self.step(batches)
            at.step += 1
            if self.average is not None:
                self.average.update(self.bare_model, at.step)
            counted += 1
            if counted == untimed:
                float(losses)
                since = time.perf_counter()
            done = at.step == self.total
            evaluates = "valid" in self.task.splits and (done or at.step % eval_steps == 0)
            saves = config.checkpoints and (at.step % save_steps == 0 or done)
            if not (evaluates or saves or done or at.step % config.log_every == 0):
                continue
            # the one place where the host waits for the device
            loss = float(losses) / counted
            timed = counted - untimed
            step_seconds = (time.perf_counter() - since) / timed if timed else 0.0
            at.seconds += counted * step_seconds
            if timed:
                self._rates.append(step_seconds)
            self._check(loss)
            line = {"step": at.step, "loss": loss, "lr": rate}
            if evaluates:
                # larger batches, another computation: what it takes is not what training takes
                self._take_memory()
                scores = self._judge(at)
                line |= _named("valid", scores)
                self._add_to_curve(scores)
                self._begin_memory()
            pace = self._speed(step_seconds) if timed else {}
            self._note(log, line, pace)
            if progress is not None:
                progress(at.step, self.total, f"loss {loss:.3g}{_told(pace)}")
            if saves or (at.stopped and config.checkpoints):
                self._save()
            if at.stopped:
                break
            losses.zero_()
            counted, untimed, since = 0, 0, time.perf_counter()

    def _begin_memory(self) -> None:
        if self.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _take_memory(self) -> None:
        if self.accelerator.device.type == "cuda":
            self._peak = max(self._peak, torch.cuda.max_memory_allocated())

    def _stream(self) -> Iterator[list[Any]]:
        """The batches of each step that is still to do, on the device."""
        pin = self.accelerator.device.type == "cuda"
        while self.position.step < self.total and not self.position.stopped:
            epoch, start = divmod(self.position.step, self.steps_per_epoch)
            order = self._batches(epoch, start)
            loader = training_loader(self.task.splits["train"], order, self.config.workers, pin)
            pieces: list[Any] = []
            for batch in loader:
                moved = to_device(batch, self.accelerator.device)
                pieces.append(self._prepare(moved, len(pieces)))
                if len(pieces) == self.config.accumulate:
                    yield pieces
                    pieces = []
                    if self.position.step == self.total:
                        return

    def _prepare(self, batch: Any, piece: int) -> Any:
        """Augment a batch, by numbers that no method's dropout has a part in."""
        if type(self.task).prepare is Task.prepare:
            return batch
        device = self.accelerator.device
        place = (self.config.seed, self.position.step, piece, self.accelerator.process_index)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
            return self.task.prepare(batch)

    def _batches(self, epoch: int, start: int) -> EpochBatches:
        config, split = self.config, self.task.splits["train"]
        if config.group_by_length and split.lengths is None:
            raise ValueError("group_by_length=true, but this recipe's examples have no lengths")
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        if config.batch_size % (processes * config.accumulate):
            raise ValueError(
                f"batch_size {config.batch_size} cannot be split among {processes} processes"
                f" × accumulate={config.accumulate}"
            )
        return EpochBatches(
            len(split),
            config.batch_size,
            config.seed,
            epoch,
            lengths=split.lengths if config.group_by_length else None,
            pieces=processes * config.accumulate,
            mine=range(rank * config.accumulate, (rank + 1) * config.accumulate),
            start=start,
            drop_last=config.drop_last,
        )

    def _measure(self, split: str) -> dict[str, float]:
        return evaluate(self.task, self.judged, split, self.config, self.accelerator)

    def _judge(self, at: _Position) -> dict[str, float]:
        """Measure ``valid``, keep the best weights, and decide whether to stop."""
        scores = self._measure("valid")
        score = scores[self.task.metric]
        sign = 1 if self.task.higher_is_better else -1
        better = at.best_score is None or sign * (score - at.best_score) > 0
        if math.isfinite(score) and better:
            at.best_score, at.best_step, at.worse = score, at.step, 0
            if self.config.best or self.config.patience:
                state = self.judged.state_dict()
                self._best = {name: tensor.detach().clone() for name, tensor in state.items()}
        else:
            at.worse += 1
            at.stopped = bool(self.config.patience) and at.worse >= self.config.patience
        return scores

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} at step {self.position.step}: training has diverged; "
                "a smaller lr (or filter_lr), clip=1 or precision=fp32 may help"
            )

    def _note(self, log: Log, line: dict[str, Any], pace: dict[str, float] | None = None) -> None:
        """Keep a line; what time has a part in goes to TensorBoard alone, so that runs compare."""
        self.history.append(line)
        moved = self._moved()
        log.write(line | (pace or {}) | ({} if moved is None else {"filters/moved": moved}))

    def _speed(self, seconds_per_step: float) -> dict[str, float]:
        """Tokens a second and MFU of a step, where the task says what an example takes."""
        work = self.task.work
        if work is None:
            return {}
        return speed(work, self.config.batch_size / seconds_per_step, self._peak_flops)

    def _add_to_curve(self, scores: dict[str, float]) -> None:
        at, work = self.position, self.task.work
        point: dict[str, float] = {"step": at.step}
        if work is not None:
            point["tokens"] = at.step * self.config.batch_size * work.tokens
        metric = self.task.metric
        at.curve.append(
            point | {"seconds": round(at.seconds, 3), f"valid {metric}": scores[metric]}
        )

    def _moved(self) -> float | None:
        """Mean |w − its start| over what the filters learn."""
        if not self._start:
            return None
        steps = [
            ((f.theta.detach() - self._start[name]) * f.lr_multiplier).abs().flatten()
            for name, f in _learning(self.bare_model)
        ]
        return float(torch.cat(steps).mean())

    def _save(self) -> None:
        def save(folder: Path) -> None:
            self.accelerator.save_state(str(folder / "state"))
            save_randomness(folder / self._own_randomness())
            if self._best is not None and self.accelerator.is_main_process:
                torch.save(self._best, folder / _BEST)

        state = {"position": vars(self.position), "history": self.history, "rates": self._rates}
        write_checkpoint(
            self.folder / "checkpoints", self.position.step, state, save, self.accelerator
        )
        if self.accelerator.is_main_process:
            write_metrics(self.folder, self.history)

    def _resume(self) -> None:
        """Go on from the newest checkpoint that can be read."""
        found = checkpoints(self.folder / "checkpoints")
        for checkpoint in found:
            try:
                self._load(checkpoint)
                return
            except Exception as error:
                if self.accelerator.num_processes > 1:
                    # the others may have read it: all of them go on together or not at all
                    raise ValueError(f"{checkpoint} cannot be read, delete it: {error}") from error
                warnings.warn(
                    f"{checkpoint} cannot be read and is passed over: {error}", stacklevel=2
                )
        if found:
            raise ValueError(f"no checkpoint in {found[0].parent} can be read; delete it")

    def _load(self, checkpoint: Path) -> None:
        state = read_state(checkpoint)
        self.accelerator.load_state(str(checkpoint / "state"))
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                # it comes back on the CPU, where no graph would read it
                group["lr"] = group["lr"].to(self.accelerator.device)
        best = checkpoint / _BEST
        if best.exists():
            self._best = torch.load(best, map_location=self.accelerator.device, weights_only=True)
        self.position = _Position(**state["position"])
        self.history, self._rates = state["history"], state["rates"]
        load_randomness(checkpoint / self._own_randomness())

    def _own_randomness(self) -> str:
        return f"randomness-{self.accelerator.process_index}.pt"


def _learning(model: nn.Module) -> list[tuple[str, Any]]:
    """The filters that learn something."""
    found = gfsa.filters_of(model).items()
    return [(name, f) for name, f in found if getattr(f, "theta", None) is not None]


def _told(pace: dict[str, float]) -> str:
    """``, 812,000 tokens/s, MFU 25 %``"""
    if not pace:
        return ""
    share = f", MFU {pace['mfu']:.0%}" if "mfu" in pace else ""
    return f", {pace['tokens_per_second']:,.0f} tokens/s{share}"


def _named(split: str, scores: dict[str, float]) -> dict[str, float]:
    return {f"{split}/{name}": value for name, value in scores.items()}
