"""CMU AN4: 1,078 utterances of names, numbers and letters, as 13 cepstra per frame.

One file, ``an4_mfcc.npz``, holds for ``train`` and ``test`` the concatenated frames ``feat_*``,
the counts ``n_frame_*``, ``text_*`` and ``utt_*``.
"""

from __future__ import annotations

from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from gfsa_experiments.data.files import BadRows, check_count, find_file, read_npz
from gfsa_experiments.data.sources import source_of
from gfsa_experiments.tasks.speech.utterances import Utterance, normalised, refusal_of_text

FILE = "an4_mfcc.npz"
Stored = TypeVar("Stored")


@lru_cache(maxsize=2)
def read_an4(data_dir: Path) -> tuple[list[Utterance], list[Utterance]]:
    """The training and the test utterances, of different speakers."""
    path = find_file(data_dir, [FILE], source_of("an4"))
    return _part(path, "train"), _part(path, "test")


def _part(path: Path, part: str) -> list[Utterance]:
    names = [f"{kind}_{part}" for kind in ("feat", "n_frame", "text", "utt")]
    features, frames, texts, ids = read_npz(path, names).values()
    frames = frames.astype(np.int64)
    if features.ndim != 2 or len(features) != frames.sum():
        raise ValueError(
            f"{path}: expected feat_{part} of shape ({frames.sum()}, size), the sum of "
            f"n_frame_{part}, got {features.shape}"
        )
    if not len(frames) == len(texts) == len(ids):
        raise ValueError(
            f"{path}: n_frame_{part}, text_{part} and utt_{part} must be of one length, "
            f"got {len(frames)}, {len(texts)} and {len(ids)}"
        )
    bad, found = BadRows(f"{path}, {part}", "utterances", "utterance"), []
    spoken = np.split(features, np.cumsum(frames)[:-1])
    for name, text, of_one in zip(map(str, ids), map(str, texts), spoken, strict=True):
        reason = refusal_of_text(text) or _refusal_of_features(of_one)
        if reason is not None:
            bad.add(name, reason)
            continue
        found.append(
            Utterance(
                part=part,
                name=name,
                # an251-fash-b: number, speaker, microphone
                speaker=name.split("-")[-2] if "-" in name else name,
                text=" ".join(text.split()),
                frames=len(of_one),
                features=partial(_as_it_is, normalised(torch.from_numpy(of_one).float())),
                source=partial(_as_it_is, sha256(of_one.tobytes()).digest()),
            )
        )
    bad.report(len(found))
    official = source_of("an4").sizes[("train", "valid", "test").index(part)]
    check_count(f"AN4 {part}", len(texts), official, "utterances")
    return found


def _as_it_is(value: Stored) -> Stored:
    return value


def _refusal_of_features(features: np.ndarray) -> str | None:
    if not len(features):
        return "it has no frames"
    return None if np.isfinite(features).all() else "its features are not finite"
