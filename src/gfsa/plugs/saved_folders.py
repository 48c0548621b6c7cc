"""The three kinds of folders that have filters, each with a function of its own that loads it."""

from __future__ import annotations

from pathlib import Path

# file → what a folder with it is, what loads it, and the arguments; the first file decides: beside
# an adapter there may be filters
_WHOLE = ("a whole model", "gfsa.from_pretrained", "AutoModelFor…")
_KINDS = {
    "adapter_config.json": ("an adapter of peft", "gfsa.load_peft", "base_model"),
    "filters.json": ("filters alone", "gfsa.load", "model"),
    "model.safetensors": _WHOLE,
    "model.safetensors.index.json": _WHOLE,
}


def other_loader(folder: str | Path, caller: str) -> str | None:
    """What a folder is and what loads it; None if the caller loads it, or if it is another folder.

    Args:
        folder: a folder in which the caller has not found its files.
        caller: the function that looked for them, as users call it: ``"gfsa.load"``.
    """
    for file, (kind, loader, argument) in _KINDS.items():
        if (Path(folder) / file).is_file():
            call = f'{loader}({argument}, "{folder}")'
            return None if loader == caller else f"{folder} is {kind}, which {call} loads"
    return None
