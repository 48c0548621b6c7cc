"""The config of a model of transformers, with errors that say what a path is instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gfsa.plugs.saving.files import other_loader


def read_config(path: str, **kwargs: Any) -> Any:
    """``AutoConfig.from_pretrained``, which has a ``ValueError`` for whatever is no such model.

    Args:
        path: a folder, or a name on the Hub.
        kwargs: for ``AutoConfig.from_pretrained``.
    """
    import transformers

    refusal = refusal_of_path(path)
    if refusal is not None:
        raise ValueError(refusal)
    try:
        return transformers.AutoConfig.from_pretrained(path, **kwargs)
    # whatever transformers raises for a file that has other JSON than a config
    except Exception as error:
        where = "" if Path(path).is_dir() else " here or from the Hub"
        raise ValueError(
            f"the config of {path} cannot be read{where}: {type(error).__name__}: {one_line(error)}"
        ) from error


def refusal_of_path(path: str | Path) -> str | None:
    """Why there is no model of transformers at a path; None if there is, or it may be a name."""
    expected = "expected the folder of a whole model, which model.save_pretrained writes"
    folder = Path(path)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return None
        # whoever asks loads whole models
        found = other_loader(folder, "gfsa.from_pretrained") or f"{path} has no config.json"
        return f"{found}; {expected}"
    if folder.is_file():
        return f"{path} is a file; {expected}"
    if str(path).startswith("~"):
        return f"{path} does not exist: only a shell expands ~, Path(...).expanduser() does here"
    # on Windows an absolute path begins with a drive
    if folder.is_absolute() or str(path).startswith("."):
        return f"{path} does not exist; {expected}"
    return None


def one_line(error: Exception) -> str:
    """The message of an error without its line breaks, and not too long."""
    return f"{' '.join(str(error).split()):.400}"
