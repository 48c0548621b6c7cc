"""CMU AN4: 1,078 utterances of names, numbers and letters, as 13 cepstra a frame.

One file, ``an4_mfcc.npz``, with ``feat_*``, all frames of a set one after the other,
``n_frame_*``, ``text_*`` and ``utt_*`` for ``train`` and ``test``.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gfsa_experiments.engine.task import DataSource
from gfsa_experiments.tasks.speech.data import (
    Utterances,
    normalised,
    report_malformed,
    warn_of_count,
    wrong_text,
)

FILE = "an4_mfcc.npz"
_OFFICIAL = {"train": 948, "test": 130}

SOURCE = DataSource(
    "an4",
    f"{FILE} or an4/{FILE}: the 13-dimensional MFCC that CMU distributes, with transcripts",
    "audio and transcripts: http://www.speech.cs.cmu.edu/databases/an4",
)


@lru_cache(maxsize=2)
def read_an4(data_dir: Path) -> tuple[Utterances, Utterances]:
    """The training and the test utterances; their speakers differ."""
    path = _find(data_dir)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged or no .npz file ({error}); get it again") from error
    return _part(path, arrays, "train"), _part(path, arrays, "test")


def _find(data_dir: Path) -> Path:
    looked = [data_dir / FILE, data_dir / "an4" / FILE]
    for path in looked:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"AN4 was not found: looked for {' and '.join(map(str, looked))}. {SOURCE.where}"
    )


def _part(path: Path, arrays: dict[str, np.ndarray], part: str) -> Utterances:
    names = [f"{kind}_{part}" for kind in ("feat", "n_frame", "text", "utt")]
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; it has {', '.join(arrays)}")
    features, frames, texts, ids = (arrays[name] for name in names)
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
    ends = np.cumsum(frames)
    starts = ends - frames
    # now: what follows makes them mean 0 and variance 1 in place
    hashes = [
        sha256(features[start:end].tobytes()).digest()
        for start, end in zip(starts, ends, strict=True)
    ]
    all_features = torch.from_numpy(features).float()
    kept, malformed = [], []
    for i, (text, start, end) in enumerate(zip(texts, starts, ends, strict=True)):
        wrong = wrong_text(text)
        if wrong is None and end == start:
            wrong = "has no frames"
        if wrong is None and not all_features[start:end].isfinite().all():
            wrong = "has features that are not finite"
        if wrong is None:
            kept.append(i)
            all_features[start:end] = normalised(all_features[start:end])
        else:
            malformed.append(f"utterance {ids[i]} ({text!r}) {wrong}")
    report_malformed(f"{path}, {part}", malformed, len(texts))
    warn_of_count(f"AN4 {part}", len(texts), _OFFICIAL[part])
    whole = Utterances(
        name=part,
        ids=[str(one) for one in ids],
        # an251-fash-b: number, speaker, microphone
        speakers=[str(one).split("-")[-2] if "-" in str(one) else str(one) for one in ids],
        texts=[" ".join(str(text).split()) for text in texts],
        frames=frames,
        features=partial(_cut, all_features, starts, ends),
        size=features.shape[1],
        source=partial(_one_of, hashes),
    )
    return whole.take(kept) if malformed else whole


def _one_of(hashes: Sequence[bytes], i: int) -> bytes:
    return hashes[i]


def _cut(features: Tensor, starts: np.ndarray, ends: np.ndarray, i: int) -> Tensor:
    return features[starts[i] : ends[i]]
