"""CMU AN4: 1,078 utterances of names, numbers and letters, as 13 cepstra per frame.

One file, ``an4_mfcc.npz``, holds for ``train`` and ``test`` the concatenated frames ``feat_*``,
the counts ``n_frame_*``, ``text_*`` and ``utt_*``.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from gfsa_experiments.data.files import BadRows, check_count, find_file, read_npz
from gfsa_experiments.engine.task import DataSource
from gfsa_experiments.tasks.speech.utterances import Utterances, normalised, refusal_of_text

FILE = "an4_mfcc.npz"
_OFFICIAL = {"train": 948, "test": 130}

SOURCE = DataSource(
    "an4",
    f"{FILE} or an4/{FILE}: the 13-dimensional MFCC that CMU distributes, with transcripts",
    "audio and transcripts: http://www.speech.cs.cmu.edu/databases/an4",
)


@lru_cache(maxsize=2)
def read_an4(data_dir: Path) -> tuple[Utterances, Utterances]:
    """The training and the test utterances, of different speakers."""
    path = find_file(data_dir, [FILE], SOURCE, ("", "an4"))
    return _part(path, "train"), _part(path, "test")


def _part(path: Path, part: str) -> Utterances:
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
    spoken = np.split(features, np.cumsum(frames)[:-1])
    bad, kept = BadRows(f"{path}, {part}", "utterances", "utterance"), []
    for i, (text, of_one) in enumerate(zip(texts, spoken, strict=True)):
        reason = refusal_of_text(text) or _refusal_of_features(of_one)
        if reason is None:
            kept.append(i)
        else:
            bad.add(str(ids[i]), reason)
    bad.report(len(kept))
    check_count(f"AN4 {part}", len(texts), _OFFICIAL[part], "utterances")
    names = [str(ids[i]) for i in kept]
    return Utterances(
        name=part,
        ids=names,
        # an251-fash-b: number, speaker, microphone
        speakers=[name.split("-")[-2] if "-" in name else name for name in names],
        texts=[" ".join(str(texts[i]).split()) for i in kept],
        frames=frames[kept],
        features=[normalised(torch.from_numpy(spoken[i]).float()) for i in kept].__getitem__,
        size=features.shape[1],
        source=[sha256(spoken[i].tobytes()).digest() for i in kept].__getitem__,
    )


def _refusal_of_features(features: np.ndarray) -> str | None:
    if not len(features):
        return "it has no frames"
    return None if np.isfinite(features).all() else "its features are not finite"
