"""Arrays that take long to work out, kept in a folder for the next process."""

from __future__ import annotations

import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def cached(folder: str, name: str, work_out: Callable[[], Tensors]) -> Tensors:
    """``work_out()``, or what it gave last time.

    Args:
        folder: where ``name.npz`` is kept; empty keeps nothing.
        name: must say everything that the result depends on.
        work_out: called if the file is not there, or cannot be read.
    """
    if not folder:
        return work_out()
    path = Path(folder).expanduser() / f"{name}.npz"
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as file:
                return {key: torch.from_numpy(file[key]) for key in file.files}
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            warnings.warn(f"{path} is damaged ({error}); it is made anew", stacklevel=2)
    tensors = work_out()
    path.parent.mkdir(parents=True, exist_ok=True)
    # other processes see the whole file or none
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{name}-", suffix=".npz")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **{k: v.numpy() for k, v in tensors.items()})
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return tensors
