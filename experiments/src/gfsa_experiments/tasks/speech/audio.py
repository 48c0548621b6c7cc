"""Audio files: whether they are whole, and their samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def header_of(path: Path) -> tuple[Any, str | None]:
    """What soundfile knows of a file by its header, and why the file cannot be used.

    The last sample that the header promises is read, too: a file that was cut off lacks it.
    """
    import soundfile

    if not path.is_file():
        return None, f"it has no audio file {path}"
    try:
        with soundfile.SoundFile(str(path)) as file:
            info = soundfile.info(str(path))
            file.seek(max(0, info.frames - 1))
            whole = len(file.read(1)) == min(1, info.frames)
    except soundfile.LibsndfileError as error:
        return None, f"it has an unreadable audio file, damaged or cut off ({error})"
    return info, None if whole else "its audio file is cut off"


def read_audio(path: Path) -> tuple[np.ndarray, int]:
    """The samples ``(N, channels)`` of a file, float32, and their rate."""
    import soundfile

    try:
        samples, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{path} is damaged: {error}; replace or delete it") from error
    if not np.isfinite(samples).all():
        raise ValueError(f"{path} has samples that are NaN or infinite; replace or delete it")
    return samples, rate
