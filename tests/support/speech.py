"""Tiny speech corpora in the layouts that the recipe reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

WORDS = ("YES", "NO", "GO", "STOP", "ERASE", "SIX")


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * step) % len(WORDS)] for step in (1, 3, 5)[: number % 3 + 1])


def spoken(text: str, noise: np.random.Generator, size: int = 13) -> np.ndarray:
    """Features in which each letter sounds for eight frames, each in its own way."""
    sounds = np.random.default_rng(0).normal(size=(27, size))
    places = [ord(letter) - ord("A") if letter != " " else 26 for letter in text]
    frames = np.repeat(sounds[places], 8, axis=0)
    return frames + 0.1 * noise.normal(size=frames.shape)


def write_an4(folder: Path, train: int = 24, test: int = 6) -> Path:
    """``an4_mfcc.npz`` with six speakers in train and others in test."""
    arrays: dict[str, np.ndarray] = {}
    for part, count in (("train", train), ("test", test)):
        noise = np.random.default_rng(len(part))
        texts = [sentence(i + len(part)) for i in range(count)]
        features = [spoken(text, noise) for text in texts]
        arrays[f"feat_{part}"] = np.concatenate(features).astype(np.float16)
        arrays[f"n_frame_{part}"] = np.array([len(one) for one in features], dtype=np.int32)
        arrays[f"text_{part}"] = np.array(texts)
        arrays[f"utt_{part}"] = np.array([f"an{i}-{part[0]}sp{i % 6}-b" for i in range(count)])
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "an4_mfcc.npz", **arrays)
    return folder / "an4_mfcc.npz"


def change_an4(path: Path, **changes: np.ndarray | None) -> None:
    """Write the file again with some arrays replaced, or left out."""
    with np.load(path) as file:
        arrays = {**file, **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def write_librispeech(folder: Path, name: str, count: int = 3, rate: int = 16_000) -> Path:
    """``LibriSpeech/<name>/19/198/19-198-0000.flac`` …, 0.5 s of noise each."""
    import soundfile

    chapter = folder / "LibriSpeech" / name / "19" / "198"
    chapter.mkdir(parents=True)
    noise = np.random.default_rng(0)
    lines = []
    for i in range(count):
        utterance = f"19-198-{i:04d}"
        wave = 0.1 * noise.normal(size=rate // 2 + 100 * i)
        soundfile.write(str(chapter / f"{utterance}.flac"), wave, rate)
        lines.append(f"{utterance} {sentence(i)}\n")
    (chapter / "19-198.trans.txt").write_text("".join(lines))
    return chapter
