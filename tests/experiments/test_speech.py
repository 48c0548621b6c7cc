"""The speech recipe: official layouts and damaged ones, loss, decoding, and whole runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gfsa
from gfsa_experiments.runs.row import Row
from gfsa_experiments.runs.run import carry_out
from gfsa_experiments.tasks.speech.data import (
    BLANK,
    SpeechBatches,
    Utterance,
    characters,
    pieces,
    read_speech,
)
from gfsa_experiments.tasks.speech.recipe import SpeechConfig, SpeechTask, augmentations
from support.speech import WORDS, change_an4, sentence, write_an4, write_librispeech
from support.tiny_runs import tiny_run

pytestmark = pytest.mark.filterwarnings("ignore:.*the official file:UserWarning")


def read_an4(folder: Path) -> list[list[Utterance]]:
    return list(read_speech("an4", folder, 0.0)[0].values())


def test_an4_is_read_from_the_folder_or_its_parent(tmp_path: Path) -> None:
    path = write_an4(tmp_path / "an4")
    with pytest.warns(UserWarning, match="AN4 train has 24 utterances, the official file 948"):
        train, test = read_an4(tmp_path)
    inside, _ = read_an4(path.parent)
    assert (len(train), len(test)) == (24, 6)
    assert train[0].text == sentence(5)
    assert [one.speaker for one in train[:7]] == [f"tsp{i}" for i in (0, 1, 2, 3, 4, 5, 0)]
    features = train[3].features()
    assert features.shape == (train[3].frames, 13)
    assert torch.equal(features, inside[3].features())
    assert features.mean(0).abs().max() < 1e-5
    torch.testing.assert_close(features.std(0, correction=0), torch.ones(13))
    # the utterance itself, not a neighbour
    with np.load(path) as file:
        start = file["n_frame_train"][:3].sum()
        raw = torch.from_numpy(file["feat_train"][start : start + len(features)]).float()
    corr = torch.corrcoef(torch.stack([raw.flatten(), features.flatten()]))[0, 1]
    assert corr > 0.9


def test_an4_leaves_out_few_malformed_utterances_and_says_so(tmp_path: Path) -> None:
    path = write_an4(tmp_path, train=201)
    with np.load(path) as file:
        texts, features, frames = file["text_train"], file["feat_train"], file["n_frame_train"]
    texts[7] = "  "
    features[frames[:9].sum()] = np.nan
    change_an4(path, text_train=texts, feat_train=features)
    with pytest.warns(UserWarning, match=r"2 of 201 utterances.*an7-tsp1-b.*not finite"):
        train, _ = read_an4(tmp_path)
    assert len(train) == 199
    assert not {"an7-tsp1-b", "an9-tsp3-b"} & {one.name for one in train}
    assert train[7].name == "an8-tsp2-b"
    assert train[7].features().shape == (train[7].frames, 13)
    assert all(one.features().isfinite().all() for one in train)


def test_held_out_speakers_are_heard_nowhere_else(tmp_path: Path) -> None:
    write_an4(tmp_path)
    sets, _ = read_speech("an4", tmp_path, 0.1)
    assert {part: len(some) for part, some in sets.items()} == {"train": 20, "valid": 4, "test": 6}
    assert not {one.speaker for one in sets["train"]} & {one.speaker for one in sets["valid"]}


def test_librispeech_folders(tmp_path: Path) -> None:
    for name in ("train-clean-100", "dev-clean", "test-clean", "test-other"):
        write_librispeech(tmp_path, name)
    sets, own = read_speech("LibriSpeech", tmp_path, 0.0)
    assert own.splits == {"train": 3, "valid": 3, "test": 6}
    assert [one.part for one in sets["test"]] == ["test-clean"] * 3 + ["test-other"] * 3
    dev = sets["valid"]
    assert [one.name for one in dev] == ["19-198-0000", "19-198-0001", "19-198-0002"]
    assert [one.speaker for one in dev] == ["19"] * 3
    assert [one.text for one in dev] == [sentence(0), sentence(1), sentence(2)]
    for one in dev:
        features = one.features()
        assert features.shape == (one.frames, 80)
        assert features.dtype == torch.float32
        assert features.mean(0).abs().max() < 1e-4
    assert torch.equal(pickle.loads(pickle.dumps(dev))[1].features(), dev[1].features())


def test_batches_are_padded_to_multiples(tmp_path: Path) -> None:
    write_an4(tmp_path)
    train, _ = read_an4(tmp_path)
    letters = characters()
    batches = SpeechBatches([train[3], *train], letters.encode, 32, 16)
    assert len(batches) == 25
    batch = batches.__getitems__([0, 2, 4])
    longest = max(train[i].frames for i in (3, 1, 3))
    assert batch["features"].shape == (3, -(-longest // 32) * 32, 13)
    assert batch["tokens"].shape[1] % 16 == 0
    for row, i in enumerate((3, 1, 3)):
        frames, length = batch["frames"][row], batch["lengths"][row]
        assert torch.equal(batch["features"][row, :frames], train[i].features())
        assert not batch["features"][row, frames:].any()
        assert letters.decode(batch["tokens"][row].tolist()) == train[i].text == batch["text"][row]
        assert (batch["tokens"][row, length:] == BLANK).all()
    elsewhere = pickle.loads(pickle.dumps(batches)).__getitems__([0, 2, 4])
    assert torch.equal(elsewhere["features"], batch["features"])
    assert batches.split().lengths == [one.frames for one in [train[3], *train]]


def test_utterances_too_short_for_their_text_are_reported(tmp_path: Path) -> None:
    write_an4(tmp_path)
    train, _ = read_an4(tmp_path)
    batches = SpeechBatches(train, characters().encode, 32, 16)
    with pytest.warns(UserWarning, match="24 of 24 utterances have fewer than one frame in 16"):
        batches.warn_of_unalignable(16)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_pieces_of_words_are_read_back(kind: str) -> None:
    texts = [sentence(i) for i in range(200)]
    learned = pieces(texts, kind, 21)  # type: ignore[arg-type]
    assert learned.size == 21
    for text in (sentence(5), " ".join(WORDS)):
        tokens = learned.encode(text)
        assert min(tokens) > 2
        assert learned.decode([BLANK, *tokens, 2]) == text
    with pytest.raises(ValueError, match=r"could not learn 5000 .* pieces from 200"):
        pieces(texts, kind, 5000)  # type: ignore[arg-type]


def test_characters() -> None:
    letters = characters()
    assert letters.size == 31
    assert letters.decode(letters.encode("IT'S SIX")) == "IT'S SIX"
    assert letters.decode([1, *letters.encode(" A  B "), 2]) == "A B"


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
    return SpeechTask(config, data)


def first_batch(task: SpeechTask, split: str = "train") -> dict[str, Any]:
    return task.splits[split].dataset.__getitems__([0, 1, 2, 3])  # type: ignore[attr-defined]


def run(folder: Path, out: Path, method: str = "plain", **settings: Any) -> Row:
    config = SpeechConfig(**{**SMALL, "checkpoints": False, **settings})
    return carry_out(tiny_run("speech", config, folder, out, method))


def test_augmentation_keeps_the_shape_and_hides_some_frames() -> None:
    torch.manual_seed(0)
    features = torch.rand(4, 100, 13) + 1
    masks = {"time_masks": 2, "time_width": 10, "feature_masks": 1, "feature_width": 3}
    augmented = augmentations(SpeechConfig(warp=5, **masks))(features)
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
