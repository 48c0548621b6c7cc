"""The config of a model of transformers, with errors that say what a path is instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gfsa.plugs.saved_folders import other_loader


def read_config(path: str, **kwargs: Any) -> Any:
    """``AutoConfig.from_pretrained``, which has a ``ValueError`` for whatever is no such model.

    Args:
        path: a folder, or a name on the Hub.
        kwargs: for ``AutoConfig.from_pretrained``.
    """
    import transformers

    folder = Path(path)
    expected = "expected the folder of a whole model, which model.save_pretrained writes"
    if folder.is_dir() and not (folder / "config.json").is_file():
        # no caller loads any of these
        found = other_loader(path, caller="") or f"{path} has no config.json"
        raise ValueError(f"{found}; {expected}")
    if folder.is_file() or (not folder.exists() and path.startswith((".", "/", "~"))):
        what = "is a file" if folder.is_file() else "does not exist"
        raise ValueError(f"{path} {what}; {expected}")
    try:
        return transformers.AutoConfig.from_pretrained(path, **kwargs)
    # whatever transformers raises for a file that has other JSON than a config
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        where = "cannot be read" if folder.is_dir() else "can be read neither here nor from the Hub"
        raise ValueError(
            f"the config of {path} {where}: {type(error).__name__}: {one_line(error)}"
        ) from error


def one_line(error: Exception) -> str:
    """The message of an error without its line breaks, and not too long."""
    return f"{' '.join(str(error).split()):.400}"
