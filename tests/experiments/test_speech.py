"""The speech recipe: loss, decoding, augmentation, models, and all of it end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import gfsa
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run import Run, carry_out
from gfsa_experiments.tasks.speech.recipe import SpeechConfig, SpeechTask, augmentations, build
from support.speech import write_an4, write_librispeech

pytestmark = pytest.mark.filterwarnings("ignore:.*the official file:UserWarning")

ENCODERS = ("transformer", "branchformer")
SMALL: dict[str, Any] = {
    "width": 16, "heads": 2, "hidden": 32, "depth": 2, "kernel": 5, "beam": 3,
    "batch_size": 6, "holdout": 0.2, "tokens": "char", "norm_first": True,
}  # fmt: skip
CTC_ALONE: dict[str, Any] = {"decoder_layers": 0, "ctc_weight": 1.0}
JOINT: dict[str, Any] = {"decoder_layers": 1, "decoder_hidden": 32}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_an4(folder / "an4")
    return folder


def task_of(data: Path, seed: int = 0, **settings: Any) -> SpeechTask:
    config = SpeechConfig(**{**SMALL, **settings})
    config.check()
    torch.manual_seed(seed)
    return build(config, data)


def first_batch(task: SpeechTask, split: str = "train") -> dict[str, Any]:
    return task.splits[split].dataset.__getitems__([0, 1, 2, 3])  # type: ignore[attr-defined]


def run(folder: Path, out: Path, method: str = "plain", **settings: Any) -> Row:
    return carry_out(
        Run(
            recipe="speech",
            config=SpeechConfig(**{**SMALL, "checkpoints": False, **settings}),
            method=method,
            options=MethodConfig(),
            data_dir=folder,
            out=out,
            device="cpu",
        )
    )


def test_augmentation_keeps_the_shape_and_hides_some_frames() -> None:
    torch.manual_seed(0)
    features = torch.rand(4, 100, 13) + 1
    augmented = augmentations(5, 2, 10, 1, 3)(features)
    assert augmented.shape == features.shape
    hidden = (augmented == 0).float().mean((1, 2))
    assert bool((hidden > 0).all())
    assert bool((hidden < 0.7).all())


@pytest.mark.parametrize(
    ("encoder", "parts"), [("transformer", JOINT), ("branchformer", CTC_ALONE)], ids=ENCODERS
)
def test_gfsa_begins_as_the_model_itself(data: Path, encoder: str, parts: Any) -> None:
    task = task_of(data, encoder=encoder, dropout=0.0, **parts)
    batch = first_batch(task)
    loss = task.loss(task.model, batch)
    report = gfsa.plug(task.model, K=3)
    # encoder and decoder; the decoder's look at the encoder has no powers
    assert len(report.plugged) == 2 + task.config.decoder_layers
    assert len(report.skipped) == task.config.decoder_layers
    torch.testing.assert_close(task.loss(task.model, batch), loss, rtol=1e-6, atol=0)
    graphed = SpeechTask(replace(task.config, graphs=True), task.model, task.vocabulary, {})
    torch.testing.assert_close(graphed.loss(task.model, batch), loss, rtol=1e-5, atol=0)


def test_the_decoder_learns_what_comes_next(data: Path) -> None:
    """The joint loss by hand: CTC of the tokens, cross-entropy of the tokens and the end."""
    task = task_of(data, dropout=0.0, label_smoothing=0.0, **JOINT)
    batch = first_batch(task)
    total = 0.0
    for i in range(4):
        tokens = batch["tokens"][i, : batch["lengths"][i]]
        heard = torch.cat([torch.tensor([1]), tokens])[None]
        said = task.model(batch["features"][i : i + 1], batch["frames"][i : i + 1], heard)
        wanted = torch.cat([tokens, torch.tensor([2])])
        text = F.cross_entropy(said.attention[0], wanted, reduction="sum")
        ctc = F.ctc_loss(
            said.ctc.log_softmax(-1).transpose(0, 1), tokens[None], said.lengths,
            torch.tensor([len(tokens)]), reduction="none",
        )  # fmt: skip
        total += (0.3 * ctc + 0.7 * text).item() / 4
    assert task.loss(task.model, batch).item() == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_ctc_alone_end_to_end(data: Path, tmp_path: Path, encoder: str) -> None:
    rows = {
        method: run(data, tmp_path, method, encoder=encoder, max_steps=3, lens=True, **CTC_ALONE)
        for method in ("plain", "gfsa", "degree1")
    }
    assert rows["plain"].task == f"an4 {encoder}-d2"
    assert [row.added for row in rows.values()] == [0, 12, 8]
    for row in rows.values():
        assert (row.metric, row.higher_is_better, row.steps) == ("wer", False, 3)
        assert "cer=" in row.others
    assert len(list(tmp_path.rglob("lens.html"))) == 3


def test_joint_training_and_search_end_to_end(data: Path, tmp_path: Path) -> None:
    settings = {**JOINT, "tokens": "bpe", "vocabulary": 21, "max_steps": 2, "lr": 1e-4}
    for encoder, method in zip(ENCODERS, ("gfsa", "plain"), strict=True):
        row = run(data, tmp_path, method, encoder=encoder, **settings)
        assert row.steps == 2
        assert row.test > 0
        assert "wer_greedy=" in row.others


def test_librispeech_end_to_end(tmp_path: Path) -> None:
    for name in ("train-clean-100", "dev-clean", "test-clean", "test-other"):
        write_librispeech(tmp_path, name)
    settings = {"data": "LibriSpeech", "batch_size": 3, "max_steps": 2, **CTC_ALONE}
    row = run(tmp_path, tmp_path / "runs", **settings)
    assert row.task == "data=LibriSpeech transformer-d2"
    assert "wer_test-other=" in row.others


def test_sets_are_scored_apart(data: Path) -> None:
    task = task_of(data, **CTC_ALONE)
    scores = task.score(
        [
            {"text": ["A B", "A B C D"], "part": ["clean", "other"], "greedy": ["A", "A B C D"],
             "beam": ["A B", "A B C"]},
            {"text": ["A B"], "part": ["clean"], "greedy": ["B"], "beam": ["A C"]},
        ]
    )  # fmt: skip
    assert scores["wer"] == 25
    assert scores["wer_greedy"] == 50
    assert scores["wer_other"] == 25
    assert scores["cer"] == pytest.approx(100 / 6)


def test_validation_is_greedy_and_the_test_searched(data: Path) -> None:
    task = task_of(data, **JOINT)
    task.model.eval()
    with torch.no_grad():
        assert "beam" not in task.predict(task.model, first_batch(task, "valid"))
        assert "beam" in task.predict(task.model, first_batch(task, "test"))
