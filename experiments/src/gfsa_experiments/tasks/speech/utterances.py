"""Utterances with their transcripts, and the datasets that cut batches out of them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
class Utterance:
    """A spoken sentence with its transcript.

    Args:
        part: the set it belongs to, for example ``train-clean-100``.
        name: of the utterance.
        speaker: who speaks.
        text: upper-case words separated by single spaces.
        frames: the number of feature vectors.
        features: returns them, ``(frames, size)``, with mean 0 and variance 1; can be pickled, for
            worker processes.
        source: returns what the features were computed from, or a hash of it.
    """

    part: str
    name: str
    speaker: str
    text: str
    frames: int
    features: Callable[[], Tensor]
    source: Callable[[], bytes]


def normalised(features: Tensor) -> Tensor:
    """``(frames, size)`` with mean 0 and variance 1 over the frames of this utterance."""
    return (features - features.mean(0)) / features.std(0, correction=0).clamp_min(1e-5)


def hold_out(
    utterances: Sequence[Utterance], share: float
) -> tuple[list[Utterance], list[Utterance]]:
    """Split into (kept, held out) with no speaker in both.

    Speakers are held out in a fixed random order until they have spoken ``share`` of all
    utterances.
    """
    spoken = Counter(utterance.speaker for utterance in utterances)
    if len(spoken) < 2:
        raise ValueError(
            f"{utterances[0].part} has {len(spoken)} speaker: at least 2 are needed to hold out "
            "speakers for validation; set holdout=0 to train without"
        )
    held: set[str] = set()
    for speaker in np.random.default_rng(_HOLDOUT_SEED).permutation(sorted(spoken))[:-1]:
        held.add(str(speaker))
        if sum(spoken[name] for name in held) >= share * len(utterances):
            break
    kept = [utterance for utterance in utterances if utterance.speaker not in held]
    return kept, [utterance for utterance in utterances if utterance.speaker in held]


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
        utterances: of one or several sets.
        encode: returns the tokens of a transcript.
        frames_multiple, tokens_multiple: T and L are multiples of these.
        search: decode these with a beam.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        encode: Callable[[str], list[int]],
        frames_multiple: int,
        tokens_multiple: int,
        search: bool = False,
    ) -> None:
        self.utterances = utterances
        self._tokens = [torch.tensor(encode(utterance.text)) for utterance in utterances]
        self._multiples = frames_multiple, tokens_multiple
        self._search = search

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        chosen = [self.utterances[index] for index in indices]
        tokens = [self._tokens[index] for index in indices]
        return {
            "features": _padded([utterance.features() for utterance in chosen], self._multiples[0]),
            "frames": torch.tensor([utterance.frames for utterance in chosen]),
            "tokens": _padded(tokens, self._multiples[1]),
            "lengths": torch.tensor([len(row) for row in tokens]),
            "text": [utterance.text for utterance in chosen],
            "part": [utterance.part for utterance in chosen],
            "search": self._search,
        }

    def source(self, index: int) -> Any:
        """Set, name, transcript and length of an utterance, and the source of its features."""
        utterance = self.utterances[index]
        return utterance.part, utterance.name, utterance.text, utterance.frames, utterance.source()

    def split(self) -> Split:
        return Split(self, as_it_is, [utterance.frames for utterance in self.utterances])

    def warn_of_unalignable(self, subsampling: int) -> None:
        """CTC needs a frame for each token and another one between two equal tokens."""
        lengths = torch.tensor([utterance.frames for utterance in self.utterances])
        frames = -(-lengths // subsampling)
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
