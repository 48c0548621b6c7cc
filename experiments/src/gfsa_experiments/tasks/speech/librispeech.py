"""LibriSpeech: folders of FLAC files with their transcripts.

``LibriSpeech/<set>/<speaker>/<chapter>/<speaker>-<chapter>.trans.txt`` has a line for each
``<speaker>-<chapter>-<number>.flac``: its name, a space, its words. Features are 80 log-Mel
energies of 25 ms every 10 ms, computed when an utterance is read.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from gfsa_experiments.data.files import BadRows, check_count
from gfsa_experiments.data.sources import source_of
from gfsa_experiments.tasks.speech.audio import header_of, read_audio
from gfsa_experiments.tasks.speech.utterances import Utterance, normalised, refusal_of_text

SAMPLE_RATE = 16_000
HOP = 160
_WINDOW = 400

UTTERANCES = {
    "train-clean-100": 28_539,
    "train-clean-360": 104_014,
    "train-other-500": 148_688,
    "dev-clean": 2_703,
    "dev-other": 2_864,
    "test-clean": 2_620,
    "test-other": 2_939,
}


@lru_cache(maxsize=8)
def read_librispeech(data_dir: Path, name: str, mels: int = 80) -> list[Utterance]:
    """One of the sets, e.g. ``train-clean-100``; the audio stays on the disk."""
    if name not in UTTERANCES:
        raise ValueError(f"LibriSpeech has no set {name!r}; it has {', '.join(UTTERANCES)}")
    folder = _find(data_dir, name)
    found, bad = [], BadRows(folder, "utterances", "utterance")
    transcribed: set[Path] = set()
    for transcript in sorted(folder.glob("*/*/*.trans.txt")):
        for line in transcript.read_text(encoding="utf-8").splitlines():
            utterance, _, text = line.partition(" ")
            path = transcript.parent / f"{utterance}.flac"
            transcribed.add(path)
            samples, reason = _samples(path)
            reason = reason or refusal_of_text(text)
            if reason is not None:
                bad.add(f"{utterance} in {transcript.name}", reason)
                continue
            found.append(
                Utterance(
                    part=name,
                    name=utterance,
                    speaker=utterance.split("-")[0],
                    text=" ".join(text.split()),
                    frames=samples // HOP + 1,
                    features=partial(_features, path, mels),
                    source=path.read_bytes,
                )
            )
    if not transcribed:
        raise ValueError(f"{folder} has no <speaker>/<chapter>/*.trans.txt; get {name} again")
    for path in sorted(set(folder.glob("*/*/*.flac")) - transcribed):
        bad.add(path.name, "it has no transcript")
    bad.report(len(found))
    check_count(f"LibriSpeech {name}", len(found), UTTERANCES[name], "utterances")
    return found


def log_mel(wave: Tensor, mels: int) -> Tensor:
    """Log-Mel energies of ``(samples,)``: ``(samples // 160 + 1, mels)``."""
    return _mel_filters(mels)(wave).clamp_min(1e-10).log().T


@lru_cache(maxsize=2)
def _mel_filters(mels: int) -> torch.nn.Module:
    from torchaudio.transforms import MelSpectrogram

    return MelSpectrogram(
        SAMPLE_RATE, n_fft=_WINDOW, win_length=_WINDOW, hop_length=HOP, n_mels=mels
    )


def _find(data_dir: Path, name: str) -> Path:
    source = source_of("librispeech")
    candidates = [data_dir / folder / name for folder in source.folders]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"LibriSpeech {name} was not found: there is neither of the folders "
        f"{' and '.join(map(str, candidates))}; get it from {source.where}"
    )


def _features(path: Path, mels: int) -> Tensor:
    # torchaudio.load needs torchcodec since 2.9
    samples, _ = read_audio(path)
    return normalised(log_mel(torch.from_numpy(samples[:, 0].copy()), mels))


def _samples(path: Path) -> tuple[int, str | None]:
    """The length of an audio file according to its header, or why it cannot be used."""
    info, reason = header_of(path)
    if reason is not None:
        return 0, reason
    if info.samplerate != SAMPLE_RATE or info.channels != 1:
        return 0, f"it is not mono at 16 kHz: {info.channels} channels at {info.samplerate} Hz"
    return info.frames, None
