"""Utterances with their transcripts, and the datasets that cut batches out of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from gfsa_experiments.engine.task import Split, as_it_is

LETTERS = " 'ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""The characters of the transcripts of all data sets."""

# every run holds out the same speakers
_HOLDOUT_SEED = 20240


@dataclass(frozen=True)
class Utterances:
    """Spoken sentences with their transcripts.

    Args:
        name: of the set, for example ``train-clean-100``.
        ids: a name for each utterance.
        speakers: the speaker of each.
        texts: upper-case words separated by single spaces.
        frames: the number of feature vectors of each.
        features: returns the features of the i-th, ``(frames, size)``, with mean 0 and variance 1;
            can be pickled, for worker processes.
        size: of a feature vector.
        source: returns what the features of the i-th were computed from, or a hash of it.
    """

    name: str
    ids: Sequence[str]
    speakers: Sequence[str]
    texts: Sequence[str]
    frames: np.ndarray
    features: Callable[[int], Tensor]
    size: int
    source: Callable[[int], bytes]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Iterable[int]) -> Utterances:
        """Some of them, in the given order."""
        chosen = [int(index) for index in indices]
        return replace(
            self,
            ids=[self.ids[i] for i in chosen],
            speakers=[self.speakers[i] for i in chosen],
            texts=[self.texts[i] for i in chosen],
            frames=self.frames[chosen],
            features=partial(_chosen, self.features, chosen),
            source=partial(_chosen, self.source, chosen),
        )


def _chosen(of_all: Callable[[int], Any], chosen: Sequence[int], i: int) -> Any:
    return of_all(chosen[i])


def normalised(features: Tensor) -> Tensor:
    """``(frames, size)`` with mean 0 and variance 1 over the frames of this utterance."""
    return (features - features.mean(0)) / features.std(0, correction=0).clamp_min(1e-5)


def hold_out(utterances: Utterances, share: float) -> tuple[Utterances, Utterances]:
    """Split into (kept, held out) with no speaker in both.

    Speakers are held out in a fixed random order until they have spoken ``share`` of all
    utterances.
    """
    speakers = sorted(set(utterances.speakers))
    if len(speakers) < 2:
        raise ValueError(
            f"{utterances.name} has {len(speakers)} speaker: at least 2 are needed to hold out "
            "speakers for validation; set holdout=0 to train without"
        )
    spoken = np.array(utterances.speakers)
    wanted = share * len(utterances)
    held: set[str] = set()
    count = 0
    for speaker in np.random.default_rng(_HOLDOUT_SEED).permutation(speakers)[:-1]:
        held.add(str(speaker))
        count += int((spoken == speaker).sum())
        if count >= wanted:
            break
    inside = np.isin(spoken, list(held))
    return utterances.take(np.flatnonzero(~inside)), utterances.take(np.flatnonzero(inside))


def refusal_of_text(text: str) -> str | None:
    """Why a transcript cannot be used, or None."""
    unknown = sorted(set(text) - set(LETTERS))
    if unknown:
        return f"{text!r} has characters other than A–Z, apostrophe and space: {''.join(unknown)!r}"
    return None if text.strip() else "its transcript is empty"


class SpeechBatches(Dataset[dict[str, Any]]):
    """Batches of ``features (B, T, F)``, ``frames (B,)``, ``tokens (B, L)`` and ``lengths (B,)``.

    T and L are multiples, so that few shapes occur; padding is zeros. ``text`` are the transcripts,
    ``part`` is the name of the set of each utterance, and ``search`` says whether to decode with a
    beam.

    Args:
        parts: one or several sets.
        encode: returns the tokens of a transcript.
        frames_multiple, tokens_multiple: T and L are multiples of these.
        search: decode these with a beam.
    """

    def __init__(
        self,
        parts: Sequence[Utterances],
        encode: Callable[[str], list[int]],
        frames_multiple: int,
        tokens_multiple: int,
        search: bool = False,
    ) -> None:
        self._parts = list(parts)
        self._places = [(p, i) for p, part in enumerate(parts) for i in range(len(part))]
        self._tokens = [torch.tensor(encode(text)) for part in parts for text in part.texts]
        self.frames = [int(n) for part in parts for n in part.frames]
        self._multiples = frames_multiple, tokens_multiple
        self._search = search

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        places = [(self._parts[p], i) for p, i in (self._places[index] for index in indices)]
        tokens = [self._tokens[index] for index in indices]
        return {
            "features": _padded([part.features(i) for part, i in places], self._multiples[0]),
            "frames": torch.tensor([self.frames[index] for index in indices]),
            "tokens": _padded(tokens, self._multiples[1]),
            "lengths": torch.tensor([len(row) for row in tokens]),
            "text": [part.texts[i] for part, i in places],
            "part": [part.name for part, _ in places],
            "search": self._search,
        }

    def source(self, index: int) -> Any:
        """Set, name, transcript and length of an utterance, and the source of its features."""
        number, i = self._places[index]
        part = self._parts[number]
        return part.name, part.ids[i], part.texts[i], self.frames[index], part.source(i)

    def split(self) -> Split:
        return Split(self, collate=as_it_is, lengths=self.frames)

    def warn_of_unalignable(self, subsampling: int) -> None:
        """CTC needs a frame for each token and another one between two equal tokens."""
        frames = -(-torch.tensor(self.frames) // subsampling)
        needed = [len(row) + int((row[1:] == row[:-1]).sum()) for row in self._tokens]
        short = int((torch.tensor(needed) > frames).sum())
        if short:
            warnings.warn(
                f"{short} of {len(self)} utterances have fewer than one frame in {subsampling} for "
                "each token: CTC learns nothing from them",
                stacklevel=3,
            )


def _padded(sequences: list[Tensor], multiple: int) -> Tensor:
    """``(B, N, …)``, zeros at the end, N the length of the longest, rounded up to a multiple."""
    padded = pad_sequence(sequences, batch_first=True)
    missing = -padded.shape[1] % multiple
    rest = padded.new_zeros(padded.shape[0], missing, *padded.shape[2:])
    return torch.cat([padded, rest], dim=1) if missing else padded
