"""Utterances, and how some of them become a batch."""

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

# what is spoken in all of these sets
LETTERS = " 'ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# speakers of the held-out share are the same in every run
_HOLDOUT_SEED = 20240


@dataclass(frozen=True)
class Utterances:
    """Spoken sentences with their transcripts.

    Args:
        name: of the set, ``train-clean-100``.
        ids: a name for each.
        speakers: who speaks it.
        texts: upper-case words with one space between them.
        frames: how many feature vectors each has.
        features: gives the features of the i-th, ``(frames, size)``, mean 0 and variance 1; can
            be pickled, for processes that read ahead.
        size: of a feature vector.
        source: gives what the features of the i-th were worked out from, or a hash of it.
    """

    name: str
    ids: Sequence[str]
    speakers: Sequence[str]
    texts: Sequence[str]
    frames: np.ndarray
    features: Callable[[int], Tensor]
    size: int
    source: Callable[[int], bytes] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Iterable[int]) -> Utterances:
        """Some of them, in the given order."""
        chosen = list(indices)
        return replace(
            self,
            ids=[self.ids[i] for i in chosen],
            speakers=[self.speakers[i] for i in chosen],
            texts=[self.texts[i] for i in chosen],
            frames=self.frames[chosen],
            features=partial(_chosen, self.features, chosen),
            source=None if self.source is None else partial(_chosen, self.source, chosen),
        )


def _chosen(of_all: Callable[[int], Any], chosen: Sequence[int], i: int) -> Any:
    return of_all(chosen[i])


def normalised(features: Tensor) -> Tensor:
    """``(frames, size)`` with mean 0 and variance 1 over the frames of this utterance."""
    return (features - features.mean(0)) / features.std(0, correction=0).clamp_min(1e-5)


def hold_out(utterances: Utterances, share: float) -> tuple[Utterances, Utterances]:
    """Split into (kept, held out) with no speaker in both.

    Speakers are drawn in a fixed random order until they have spoken ``share`` of all utterances.
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


def wrong_text(text: str) -> str | None:
    """What is wrong with a transcript, if anything."""
    strange = sorted(set(text) - set(LETTERS))
    if strange:
        return f"has characters other than A–Z, apostrophe and space: {''.join(strange)!r}"
    return None if text.strip() else "is empty"


def report_malformed(source: str, malformed: list[str], total: int) -> None:
    """Say how many entries were left out and why; more than 1 % is an error."""
    if not malformed:
        return
    shown = "; ".join(malformed[:3])
    message = f"{source}: {len(malformed)} of {total} entries are malformed, e.g. {shown}"
    if len(malformed) > 0.01 * total:
        raise ValueError(f"{message}. More than 1 %: get the data again")
    warnings.warn(f"{message}; these were left out", stacklevel=3)


def warn_of_count(name: str, found: int, official: int) -> None:
    """Results on another number of utterances are not comparable."""
    if found != official:
        warnings.warn(
            f"{name} has {found} utterances, the official set {official}: "
            "results are not comparable with others'",
            stacklevel=3,
        )


class SpeechBatches(Dataset[dict[str, Any]]):
    """Batches of ``features (B, T, F)``, ``frames (B,)``, ``tokens (B, L)`` and ``lengths (B,)``.

    T and L are multiples, so that few shapes occur; padding is zeros. ``text`` are the transcripts,
    ``part`` the name of each one's set, and ``search`` says whether to decode with a beam.

    Args:
        parts: one or several sets.
        encode: gives the tokens of a transcript.
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
            "lengths": torch.tensor([len(one) for one in tokens]),
            "text": [part.texts[i] for part, i in places],
            "part": [part.name for part, _ in places],
            "search": self._search,
        }

    def source(self, index: int) -> Any:
        """What was said, how long it took, and what its features were worked out from."""
        number, i = self._places[index]
        part = self._parts[number]
        heard = None if part.source is None else part.source(i)
        return part.name, part.ids[i], part.texts[i], self.frames[index], heard

    def split(self) -> Split:
        return Split(self, collate=as_it_is, lengths=self.frames)

    def warn_of_unalignable(self, subsampling: int) -> None:
        """CTC needs a frame for each token and one more between two equal ones."""
        frames = -(-torch.tensor(self.frames) // subsampling)
        needed = [len(one) + int((one[1:] == one[:-1]).sum()) for one in self._tokens]
        short = int((torch.tensor(needed) > frames).sum())
        if short:
            warnings.warn(
                f"{short} of {len(self)} utterances have fewer than one frame in {subsampling} for "
                "each token: CTC learns nothing from them",
                stacklevel=3,
            )


def _padded(sequences: list[Tensor], multiple: int) -> Tensor:
    """``(B, N, …)``, zeros at the end, N the next multiple of the longest."""
    padded = pad_sequence(sequences, batch_first=True)
    length = padded.shape[1]
    missing = -length % multiple
    if not missing:
        return padded
    rest = padded.new_zeros(padded.shape[0], missing, *padded.shape[2:])
    return torch.cat([padded, rest], dim=1)
