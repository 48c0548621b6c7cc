"""Speech data: official layouts, and what happens where they are damaged."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gfsa_experiments.tasks.speech.data import (
    BLANK,
    Characters,
    Pieces,
    SpeechBatches,
    Utterance,
    read_own,
)
from gfsa_experiments.tasks.speech.data import read_an4 as read_sets
from support.speech import WORDS, change_an4, sentence, write_an4, write_librispeech

pytestmark = pytest.mark.filterwarnings("ignore:.*the official file:UserWarning")


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    yield
    read_sets.cache_clear()
    read_own.cache_clear()


def read_an4(folder: Path) -> list[list[Utterance]]:
    return list(read_sets(folder, 0.0)[0].values())


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


def test_an4_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"found none of an4_mfcc.npz .* or its an4/"):
        read_an4(tmp_path)


def test_an4_damaged(tmp_path: Path) -> None:
    path = write_an4(tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"an4_mfcc.npz is damaged or no npz file"):
        read_an4(tmp_path)


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
    sets, _ = read_sets(tmp_path, 0.1)
    assert {part: len(some) for part, some in sets.items()} == {"train": 20, "valid": 4, "test": 6}
    assert not {one.speaker for one in sets["train"]} & {one.speaker for one in sets["valid"]}


def test_librispeech_folders(tmp_path: Path) -> None:
    for name in ("train-clean-100", "dev-clean", "test-clean", "test-other"):
        write_librispeech(tmp_path, name)
    sets, own = read_own("LibriSpeech", tmp_path, 0.0)
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
    letters = Characters()
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
    batches = SpeechBatches(train, Characters().encode, 32, 16)
    with pytest.warns(UserWarning, match="24 of 24 utterances have fewer than one frame in 16"):
        batches.warn_of_unalignable(16)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_pieces_of_words_are_read_back(kind: str) -> None:
    texts = [sentence(i) for i in range(200)]
    pieces = Pieces(texts, kind, 21)  # type: ignore[arg-type]
    assert len(pieces) == 21
    for text in (sentence(5), " ".join(WORDS)):
        tokens = pieces.encode(text)
        assert min(tokens) > 2
        assert pieces.decode([BLANK, *tokens, 2]) == text
    with pytest.raises(ValueError, match=r"could not learn 5000 .* pieces from 200"):
        Pieces(texts, kind, 5000)  # type: ignore[arg-type]


def test_characters() -> None:
    letters = Characters()
    assert len(letters) == 31
    assert letters.decode(letters.encode("IT'S SIX")) == "IT'S SIX"
    assert letters.decode([1, *letters.encode(" A  B "), 2]) == "A B"
