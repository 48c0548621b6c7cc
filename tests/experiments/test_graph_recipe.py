"""The graph recipe: its settings, its batches, its models, and whole runs on a few graphs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_geometric.nn import GPSConv

import gfsa
from gfsa_experiments.engine.step import compile_blocks, map_tensors, signature_of
from gfsa_experiments.models.graphs import MaskedBatchNorm
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.run import Run, carry_out
from gfsa_experiments.tasks.graph.recipe import GraphConfig, GraphTask, ModelName
from support.graph_files import labels, write_molecules, write_zinc
from support.graphs import randomise

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")

MODELS = get_args(ModelName)
TINY: dict[str, Any] = {
    "depth": 2,
    "width": 16,
    "heads": 2,
    "ffn_width": 16,
    "batch_size": 4,
    "max_steps": 3,
    "tensorboard": False,
}
STILL = {"dropout": 0.0, "mlp_dropout": 0.0, "attention_dropout": 0.0}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_zinc(folder)
    write_molecules(folder, "molesol", np.arange(24, dtype=np.float32) / 7)
    write_molecules(folder, "molhiv", labels(24)[:, 0])
    tox = labels(24, 12)
    tox[::3, 4] = -1
    write_molecules(folder, "moltox21", tox)
    write_molecules(folder, "peptides_func", labels(24, 10))
    return folder


def config(data: str = "zinc", model: str = "graphormer-slim", **settings: Any) -> GraphConfig:
    small = {**TINY, **settings}
    if model == "gps" and "encoding_width" not in small:
        small["encoding_width"] = 4
    return GraphConfig(data=data, model=model, **small)  # type: ignore[arg-type]


def made(folder: Path, *which: str, **settings: Any) -> GraphTask:
    chosen = config(*which, **settings)
    chosen.check()
    torch.manual_seed(chosen.seed)
    return GraphTask(chosen, folder)


def batch_of(task: GraphTask, rows: Sequence[int], part: str = "train") -> Any:
    split = task.splits[part]
    return split.collate([split.dataset[row] for row in rows])


def run(folder: Path, one: GraphConfig, method: str = "plain", out: str = "runs") -> Run:
    return Run(
        recipe="graph",
        config=one,
        method=method,
        options=MethodConfig(filter_lr=1e-2) if method == "gfsa" else MethodConfig(),
        data_dir=folder,
        out=folder.parent / out,
        device="cpu",
    )


# batches


@pytest.mark.parametrize("local", ["gine", "gated"])
def test_a_padded_gps_layer_is_pygs(data: Path, local: str) -> None:
    task = made(data, "zinc", "gps", local=local, **STILL)
    randomise(task.model)
    layer = task.model.layers[0]  # type: ignore[index]
    batch = batch_of(task, [5, 0, 3, 9])
    there = ~batch.padding
    x = torch.randn(*there.shape, 16)
    edges = torch.randn(len(batch.edge_attr), 16)
    # PyG's own forward, on nodes and edges that are real
    number = there.flatten().cumsum(0) - 1
    real = there.flatten()[batch.edge_index[0]]
    assert 0 < int(real.sum()) < len(real)
    owner = torch.arange(len(there))[:, None].expand_as(there)[there]
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    expected = GPSConv.forward(
        layer, x[there], number[batch.edge_index[:, real]], owner, edge_attr=edges[real]
    )
    after = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(state)
    found = layer(x, batch.edge_index, batch.padding, edge_attr=edges)
    torch.testing.assert_close(found[there], expected, atol=1e-4, rtol=1e-4)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, after[name], atol=1e-4, rtol=1e-4)
        if "running" in name:
            assert not torch.equal(value, state[name]), name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("which", [("zinc", "graphormer"), ("zinc", "gps"), ("molhiv", "gps")])
def test_padding_changes_nothing(data: Path, which: tuple[str, str], training: bool) -> None:
    losses, states = [], []
    for multiple in (1, 32):
        torch.manual_seed(5)
        task = made(data, *which, pad_to_multiple=multiple, **STILL)
        randomise(task.model).train(training)
        losses.append(task.loss(task.model, batch_of(task, [2, 0, 7, 9, 11])).item())
        states.append(task.model.state_dict())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_batches_have_few_shapes(data: Path, model: str) -> None:
    task = made(data, "molesol", model, pad_to_multiple=8)
    choices = [*itertools.combinations(range(len(task.splits["train"])), 3)]
    shapes = {signature_of(batch_of(task, chosen)) for chosen in choices}
    assert len(choices) == 220
    assert len(shapes) <= 12


# the norm


def test_a_masked_norm_is_the_norm_of_what_is_real() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 3, requires_grad=True)
    real = torch.tensor([True, False, True] * 4)
    masked, plain = MaskedBatchNorm(3), nn.BatchNorm1d(3)
    randomise(masked)
    plain.load_state_dict(masked.state_dict())
    padded = masked(x, real)
    found = padded[real]
    assert (padded[~real] == 0).all()
    expected = plain(x[real])
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    ours = torch.autograd.grad((found * weight).sum(), (x, *masked.parameters()))
    theirs = torch.autograd.grad((expected * weight).sum(), (x, *plain.parameters()))
    torch.testing.assert_close(ours, theirs)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(masked.state_dict()[name], value)
    masked.eval()
    plain.eval()
    torch.testing.assert_close(masked(x, real)[real], plain(x)[real])
    assert (masked(x, real)[~real] == 0).all()


# the task


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["plain", "gfsa"])
def test_the_loss_never_asks_the_device(data: Path, model: str, method: str) -> None:
    """Fake tensors have no values: whatever would wait for one fails here."""
    task = made(data, "moltox21", model)
    if method == "gfsa":
        gfsa.plug(task.model)
    batch = batch_of(task, [0, 1, 2])
    task.loss(task.model, batch)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        loss = task.loss(task.model, map_tensors(fake.from_tensor, batch))
        loss.backward()


@pytest.mark.parametrize(
    ("model", "local"), [("gps", "gated"), *((model, "gine") for model in MODELS)]
)
def test_a_block_compiles_into_one_graph(data: Path, model: str, local: str) -> None:
    """And has the gradient that it has without."""
    task = made(data, "moltox21", model, local=local, **STILL)
    gfsa.plug(task.model, wK=0.2)
    batch = batch_of(task, [0, 1, 2])

    def gradients() -> dict[str, Tensor]:
        task.model.zero_grad()
        task.loss(task.model, batch).backward()
        return {name: p.grad.clone() for name, p in task.model.named_parameters()}

    expected = gradients()
    assert sum(gradient.any() for gradient in expected.values()) > len(expected) / 2
    torch._dynamo.reset()
    compile_blocks(task.model, backend="aot_eager", fullgraph=True)
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_labels_that_are_missing_teach_nothing(data: Path) -> None:
    task = made(data, "moltox21", **STILL)
    batch = batch_of(task, [0, 1, 2, 3])
    missing = batch.y.isnan()
    assert missing.any()
    output = task.model(batch)
    each = nn.functional.binary_cross_entropy_with_logits(
        output, batch.y.nan_to_num(0.0), reduction="none"
    )
    loss = task.loss(task.model, batch)
    assert loss.item() == pytest.approx(each[~missing].mean().item(), rel=1e-5)
    assert np.isfinite(loss.item())


def test_labels_are_scored_as_ogb_does(data: Path) -> None:
    task = made(data, "moltox21")
    nan = float("nan")
    # the second label is known of two graphs, the third has one answer only
    y = torch.tensor([[0.0, 1.0, 1.0], [1.0, nan, 1.0], [0.0, 0.0, 1.0], [1.0, nan, 1.0]])
    output = torch.tensor([[0.1, 0.3, 0.0], [0.4, 9.0, 0.0], [0.5, 0.2, 0.0], [0.9, -9.0, 0.0]])
    halves = [{"output": output[:2], "y": y[:2]}, {"output": output[2:], "y": y[2:]}]
    # pairs in order: 3 of 4 and 1 of 1; precisions at the hits: (1 + 2/3) / 2 and 1
    assert task.score(halves) == pytest.approx({"rocauc": 87.5, "ap": 100 * (5 / 6 + 1) / 2})
    with pytest.raises(ValueError, match="no label has both answers"):
        task.score([{"output": output, "y": torch.ones(4, 3)}])


def test_errors_and_accuracy_are_scored(data: Path) -> None:
    y, output = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.5], [0.0]])
    scores = made(data, "molesol").score([{"output": output, "y": y}])
    assert scores == pytest.approx({"mae": 1.25, "rmse": (4.25 / 2) ** 0.5})
    task = made(data, "molesol")
    task.kind = "classes"
    logits = torch.eye(10)[[3, 4, 5]]
    assert task.score([{"output": logits, "y": torch.tensor([[3.0], [4.0], [6.0]])}]) == (
        pytest.approx({"accuracy": 200 / 3})
    )


# whole runs

RUNS = [
    ("zinc", "graphormer-slim", "mae"),
    ("peptides-func", "gps", "ap"),
    ("molhiv", "gps", "rocauc"),
]


@pytest.mark.parametrize(("which", "model", "metric"), RUNS)
def test_whole_runs(data: Path, which: str, model: str, metric: str) -> None:
    chosen = config(which, model)
    rows = {method: carry_out(run(data, chosen, method)) for method in ("plain", "gfsa")}
    for row in rows.values():
        assert (row.task, row.metric, row.steps) == (f"{which} {model}", metric, 3)
        assert row.higher_is_better == (metric not in ("mae", "rmse"))
        assert np.isfinite(row.test)
        assert row.valid is not None
        assert np.isfinite(row.valid)
    assert rows["gfsa"].added == 2 * 2 * 3
    assert rows["gfsa"].parameters == rows["plain"].parameters + 12
    assert rows["gfsa"].moved
