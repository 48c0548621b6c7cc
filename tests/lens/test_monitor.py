"""The lens while a model trains: what is logged, coefficients over training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gfsa
from gfsa.lens import measure
from gfsa.lens.monitor import Monitor, tensorboard
from gfsa.lens.trajectory import Trajectory
from support.lens import SMALL
from support.tiny import TinyEncoder, padded_batch

Logged = list[tuple[dict[str, float], int]]


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def train(model: nn.Module, monitor: Monitor, batch: dict[str, Tensor], steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        monitor.before_step(step)
        model(**batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.after_step(step)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("plugged", [False, True])
def test_logs_what_leaves_each_block(plugged: bool, shared: bool) -> None:
    model = TinyEncoder(shared=shared)
    if plugged:
        gfsa.plug(model)
        model(**padded_batch([3]))  # over with the check of the first forward, and its hooks
    batch = padded_batch([9, 5, 12])
    with torch.no_grad():
        states = model.states(**batch)[1:]
    logged: Logged = []
    others = hooks(model)
    monitor = Monitor(model, lambda values, step: logged.append((values, step)), every=2)
    train(model, monitor, batch, steps=5)
    assert [step for _, step in logged] == [0, 2, 4]
    assert hooks(model) == others
    first = logged[0][0]
    valid = batch["attention_mask"].bool()
    for depth, state in enumerate(states, start=1):
        for name, function in (
            ("cosine", measure.cosine_similarity),
            ("residual", measure.rank_one_residual),
            ("norm", measure.token_norm),
        ):
            expected = function(state, valid).mean().item()
            assert first[f"lens/{name}/{depth:02d}"] == pytest.approx(expected, rel=1e-5)
    coefficients = {name: value for name, value in logged[-1][0].items() if "/c" in name[4:7]}
    layers = 1 if shared else 3
    assert len(coefficients) == (3 + 3 * layers if plugged else 3)


def test_training_is_not_changed() -> None:
    batch = padded_batch([9, 5, 12])
    torch.manual_seed(1)
    watched = TinyEncoder()
    torch.manual_seed(1)
    alone = TinyEncoder()
    train(watched, Monitor(watched, lambda values, step: None, every=1), batch, steps=3)
    train(alone, Monitor(alone, lambda values, step: None, every=10**9), batch, steps=3)
    for one, other in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


def test_parts_that_are_called_apart_keep_their_layers_numbers() -> None:
    model = nn.ModuleDict({"first": TinyEncoder(), "second": TinyEncoder()})
    batch = padded_batch([6, 4])
    logged: Logged = []
    monitor = Monitor(model, lambda values, step: logged.append((values, step)), every=1)
    monitor.before_step(0)
    for part in ("second", "first", "first"):
        model[part](**batch)
    monitor.after_step(0)
    valid = batch["attention_mask"].bool()
    for before, part in ((0, "first"), (3, "second")):
        with torch.no_grad():
            states = model[part].states(**batch)[1:]
        for depth, state in enumerate(states, start=1 + before):
            expected = measure.cosine_similarity(state, valid).mean().item()
            assert logged[0][0][f"lens/cosine/{depth:02d}"] == pytest.approx(expected, rel=1e-5)
    assert hooks(model) == 0


def numbers_of(monitor: Monitor) -> list[int]:
    """How often each number was measured in a step."""
    return list(Counter((what, depth) for what, depth, _ in monitor._found).values())


def test_a_checkpointed_part_is_counted_once() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = TinyEncoder()

        def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
            out = checkpoint(self.part, tokens, attention_mask, use_reentrant=False)
            assert isinstance(out, Tensor)
            return out

    model = Checkpointed()
    looked: list[int] = []
    monitor = Monitor(model, lambda values, step: looked.extend(numbers_of(monitor)), every=1)
    batch = padded_batch([6, 4])
    batch["tokens"].requires_grad_(True)
    train(model, monitor, batch, steps=1)
    assert looked == [1] * 9


def test_a_step_that_did_not_end_leaves_no_hooks() -> None:
    model, batch = TinyEncoder(), padded_batch([6, 4])
    logged: Logged = []
    monitor = Monitor(model, lambda values, step: logged.append((values, step)), every=2)
    # as where a step is skipped for a gradient that is not finite
    monitor.before_step(0)
    monitor.before_step(1)
    assert hooks(model) == 0
    monitor.before_step(2)
    monitor.before_step(2)
    model(**batch)
    monitor.after_step(2)
    assert hooks(model) == 0
    assert [step for _, step in logged] == [2]
    assert sum(name.startswith("lens/cosine") for name in logged[0][0]) == 3


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_in_which_no_block_runs_warns(compiled: bool) -> None:
    model, batch = nn.ModuleDict({"net": TinyEncoder()}), padded_batch([6, 4])
    monitor = Monitor(model, lambda values, step: None, every=1)
    if compiled:
        model["net"].compile(backend="eager")
        model["net"](**batch)
    monitor.before_step(0)
    if compiled:
        model["net"](**batch)
    why = r"torch\.compile fused them" if compiled else "inside of a call"
    with pytest.warns(UserWarning, match=f"no block of the model ran .*{why}"):
        monitor.after_step(0)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_refuses_an_interval_that_is_none(every: Any) -> None:
    with pytest.raises(ValueError, match="every"):
        Monitor(TinyEncoder(), lambda values, step: None, every=every)


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = TinyEncoder()
    gfsa.plug(model)
    train(model, Monitor(model, tensorboard(tmp_path), every=2), padded_batch([6, 4]), steps=3)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"lens/cosine/01", "lens/residual/03", "lens/norm/02", "lens/c0/01"} <= set(tags)
    assert [event.step for event in events.Scalars("lens/cosine/01")] == [0, 2]


def test_transformers_trainer(tmp_path: Path) -> None:
    import transformers as hf

    from gfsa.lens.callbacks.transformers import LensCallback

    model = hf.BertForSequenceClassification(hf.BertConfig(**SMALL))
    gfsa.plug(model)
    mask = torch.arange(8) < torch.tensor([[8], [5]])
    item = {"input_ids": torch.arange(8), "labels": 1}
    data = [{**item, "attention_mask": mask[i % 2].long()} for i in range(20)]
    logged: Logged = []
    callback = LensCallback(every=3, log=lambda values, step: logged.append((values, step)))
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=7,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    hf.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    assert [step for _, step in logged] == [0, 3, 6]
    assert {"lens/cosine/01", "lens/cosine/02", "lens/c0/01"} <= set(logged[-1][0])
    assert {"lens/cosine/01", "lens/cosine/02", "lens/c2/02"} <= set(logged[0][0])
    assert "lens/cosine/03" not in logged[0][0]


def test_lightning(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from gfsa.lens.callbacks.lightning import LensCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = TinyEncoder()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    module = Module()
    logged: Logged = []
    callback = LensCallback(every=2, log=lambda values, step: logged.append((values, step)))
    trainer = pl.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback, LensCallback(every=2)],
    )
    # two batches a step, four steps
    batches = [padded_batch([6, 4]) for _ in range(8)]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    assert [step for _, step in logged] == [0, 2]
    # training_step calls a part of the LightningModule, whose own forward never runs
    similarity = [name for name in logged[0][0] if name.startswith("lens/cosine")]
    assert similarity == ["lens/cosine/01", "lens/cosine/02", "lens/cosine/03"]
    assert hooks(module) == 0
    assert any((tmp_path / "lens").iterdir())


def moving_model(steps: int = 3) -> tuple[TinyEncoder, Trajectory]:
    """Filters in layers 2 and 4 of four, whose θ grows by 0.25 from step to step of ten."""
    model = TinyEncoder(depth=4)
    gfsa.plug(model, layers="even")
    trajectory = Trajectory()
    for at in range(steps):
        trajectory.record(model, 10 * at)
        with torch.no_grad():
            for graph_filter in gfsa.filters_of(model).values():
                graph_filter.theta += 0.25
    return model, trajectory


def test_every_step_has_the_coefficients_of_that_step() -> None:
    model, trajectory = moving_model()
    assert trajectory.steps == [0, 10, 20]
    assert [layer.depth for layer in trajectory.layers] == [2, 4]
    assert [layer.name for layer in trajectory.layers] == list(gfsa.filters_of(model))
    # c = (w0, w1 + (2−K)·wK, (K−1)·wK) with K = 3, and each w moves by 0.25 a step
    rows = [step[0] for step in trajectory.layers[0].coefficients]
    assert rows == [[0.0, 1.0, 0.0], [0.25, 1.0, 0.5], [0.5, 1.0, 1.0]]


def test_csv_and_back(tmp_path: Path) -> None:
    _, trajectory = moving_model()
    path = tmp_path / "coefficients.csv"
    trajectory.to_csv(path)
    head, first, *rest = path.read_text().splitlines()
    assert head == "step,layer,name,head,c0,c1,c2"
    assert first.split(",")[:2] == ["0", "2"]
    # three steps, two layers, four heads
    assert len(rest) + 1 == 3 * 2 * 4
    again = Trajectory.from_csv(path)
    assert again == trajectory
    assert Trajectory.from_plain(again.to_plain()) == trajectory
    again.layers[0].name = "=cmd|' /C calc'!A0"
    assert ",'=cmd|" in again.to_text()


def test_filters_that_do_not_learn_are_left_out() -> None:
    model = TinyEncoder(depth=2)
    gfsa.plug(model, filter=gfsa.Twicing)
    trajectory = Trajectory()
    trajectory.record(model, 0)
    assert trajectory.layers == []


def test_a_changed_model_and_a_repeated_step_are_refused() -> None:
    model, trajectory = moving_model()
    with pytest.raises(ValueError, match="expected a step after 20"):
        trajectory.record(model, 20)
    gfsa.unplug(model)
    with pytest.raises(ValueError, match="filters have changed"):
        trajectory.record(model, 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,loss\n1,2\n", "expected the columns step, layer, name, head, c0"),
        ("", "got none"),
        ("step,layer,name,head,c0\n", "no step was recorded"),
        ("step,layer,name,head,c0\n0,1,a,1,0.5\n0,1,a,3,0.5\n", "out of order"),
        ("step,layer,name,head,c0\n0,1,a,1,0.5\n0,2,b,1,0.5\n5,1,a,1,0.5\n", "1 of 2 steps"),
        ("step,layer,name,head,c0\n0,1,a,1,many\n", "damaged"),
        # a missing c0 must not make c0 of c1, nor a line that is cut off a filter of lower degree
        ("step,layer,name,head,c0,c1\n0,1,a,1,,0.5\n", "damaged"),
        ("step,layer,name,head,c0,c1\n0,1,a,1,0,1\n0,1,a,2,0\n", "as many heads"),
        (
            "step,layer,name,head,c0\n0,1,a,1,0\n0,1,a,2,0\n5,1,a,1,0\n",
            "as many heads and coefficients",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Trajectory.from_csv(path)
