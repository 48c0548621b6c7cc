"""The file of saved filters: safetensors, with the description of the filters in its header.

The file is written under a temporary name, synchronised to the disk and renamed: a reader sees the
last save or the new one. Older versions wrote the description into ``filters.json`` beside it,
which is still read. A name on the Hub is downloaded into a folder first.
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gfsa.plugs.adapter import CHILD

FILE = "filters.safetensors"
OLD_DESCRIPTION = "filters.json"
"""The second file of older versions."""
MOST_BYTES = 8 * 2**20
"""Filters are a few numbers per head: a larger file is refused before it is read."""

# the entry of the safetensors header that holds the description
_KEY = "gfsa"

# file → what a folder with it is, what loads it, and the arguments; the first file decides: beside
# an adapter there may be filters
_WHOLE = ("a whole model", "gfsa.from_pretrained", "AutoModelFor…")
_FOLDERS = {
    "adapter_config.json": ("an adapter of peft", "gfsa.load_peft", "base_model"),
    FILE: ("filters alone", "gfsa.load", "model"),
    "model.safetensors": _WHOLE,
    "model.safetensors.index.json": _WHOLE,
}


def write(folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write one save into ``folder``, which is made if it does not exist.

    Until the new file is complete on the disk, an earlier save in the folder stays as it is.
    """
    from safetensors.torch import save as serialise

    text = json.dumps(description, allow_nan=False)
    content = serialise(dict(tensors), metadata={_KEY: text})
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise type(error)(
            f"gfsa.save writes a folder, but a part of {folder} is a file or a broken link; choose "
            "another path"
        ) from error
    temporary = folder / f".filters-{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / FILE)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # what an older version left here is not read any more
    (folder / OLD_DESCRIPTION).unlink(missing_ok=True)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description, a JSON object of any content, and the tensors of a save."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    file = folder / FILE
    content = _read(file)
    text: str | bytes | None = _description_in(content, file)
    if text is None:
        file = folder / OLD_DESCRIPTION
        if not file.is_file():
            raise ValueError(
                f"{folder / FILE} does not describe its filters: it is damaged, or gfsa.save did "
                "not write it; save the filters again"
            )
        text = _read(file)
    description = _parse(text, file)
    try:
        return description, load(content)
    # beside its own error, dtypes that torch does not have and shapes beyond its range
    except (SafetensorError, KeyError, AttributeError, ValueError, RuntimeError) as error:
        raise damaged(folder / FILE, error) from error


def other_loader(folder: str | Path, caller: str) -> str | None:
    """What a folder is and what loads it; None if ``caller`` does, or if it is another folder."""
    for file, (kind, loader, argument) in _FOLDERS.items():
        if (Path(folder) / file).is_file():
            call = f'{loader}({argument}, "{folder}")'
            return None if loader == caller else f"{folder} is {kind}, which {call} loads"
    return None


def _read(file: Path) -> bytes:
    if not file.is_file():
        advice = other_loader(file.parent, "gfsa.load") or "gfsa.save writes filters"
        raise FileNotFoundError(f"{file} does not exist; {advice}")
    with file.open("rb") as opened:
        _check_size(os.fstat(opened.fileno()).st_size, f"{file.name} of {file.parent}")
        return opened.read(MOST_BYTES)


def _check_size(size: int, what: str) -> None:
    if size > MOST_BYTES:
        raise ValueError(
            f"{what} has {size} bytes; filters are a few numbers per head, more than "
            f"{MOST_BYTES} is refused"
        )


def _description_in(content: bytes, file: Path) -> str | None:
    """The text in the header of a safetensors file; None if it has none, as in older versions."""
    header = _parse(content[8 : 8 + int.from_bytes(content[:8], "little")], file)
    metadata = header.get("__metadata__")
    text = metadata.get(_KEY) if isinstance(metadata, dict) else None
    return text if isinstance(text, str) else None


def _parse(text: str | bytes, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_unique_keys)
        if not isinstance(found, dict):
            raise TypeError(f"expected a JSON object, got {type(found).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(file, error) from error
    return found


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def damaged(file: str | Path, error: Exception) -> ValueError:
    """The error of a file that cannot be read."""
    return ValueError(f"{file} is damaged: {error!s:.200}; save or download it again")


def filter_tensors(files: Iterable[str | Path], source: str) -> dict[str, Tensor]:
    """The tensors of filters in the safetensors of a whole model or an adapter, by full names."""
    found = {}
    size = 0
    for key, shape, read in _entries_of(files):
        if f".{CHILD}." in key:
            # at most 8 bytes a number
            size += 8 * math.prod(shape)
            _check_size(size, f"what filters add to {source}")
            found[key] = read(key)
    return found


def matrices_of(files: Iterable[str | Path], layer: str) -> dict[str, Tensor]:
    """The matrices of a layer in the safetensors of a whole model, without those of its filter."""
    return {
        key: read(key)
        for key, shape, read in _entries_of(files)
        if key.startswith(f"{layer}.") and f".{CHILD}." not in key and len(shape) > 1
    }


def _entries_of(files: Iterable[str | Path]) -> Iterator[tuple[str, list[int], Any]]:
    """Name and shape of each tensor in these safetensors, and the function that reads it."""
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="pt") as checkpoint:
                for key in checkpoint.keys():  # noqa: SIM118  (not a dict)
                    yield key, checkpoint.get_slice(key).get_shape(), checkpoint.get_tensor
        except SafetensorError as error:
            raise damaged(file, error) from error


HUB_ARGUMENTS = (
    *("cache_dir", "force_download", "local_files_only"),
    *("revision", "subfolder", "token"),
)
"""Arguments of ``from_pretrained`` that say where on the Hub the files of a checkpoint are."""

_HUB = "hub:"


def filter_folder(
    path: str | Path, revision: str | None = None, token: str | bool | None = None
) -> Path:
    """The folder with the filters of ``path``, which are downloaded if it is a name on the Hub.

    ``hub:user/name`` is a repository. ``user/name`` is one, too, unless that path exists here, or
    the folder ``user`` does: then a folder inside it is meant. Anything else is a folder.
    """
    name = str(path).removeprefix(_HUB) if isinstance(path, str) else ""
    is_name = is_hub_name(name) and ".." not in name
    if isinstance(path, str) and path.startswith(_HUB):
        if not is_name:
            raise ValueError(f"expected {_HUB}user/name, got {path!r:.80}")
    elif not is_name or Path(name).exists():
        if revision is not None or token is not None:
            raise ValueError(
                "revision and token are for a repository of the Hub ('user/name'), but "
                f"{path} is a folder; leave them out"
            )
        return Path(path)
    elif Path(name).parent.exists():
        raise FileNotFoundError(
            f"{path} does not exist, though {Path(name).parent} does; for the repository of that "
            f"name on the Hub pass {_HUB + name!r}"
        )
    return download(name, {"revision": revision, "token": token}).parent


def is_hub_name(name: str) -> bool:
    """Whether ``name`` can be a repository, ``user/name``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def hub_library(name: str) -> Any:
    """``huggingface_hub``, or an error that says what ``name`` needs it for."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(f"{name} needs huggingface_hub: pip install huggingface_hub") from error
    return huggingface_hub


def download(name: str, wanted: Mapping[str, Any], file: str = FILE) -> Path:
    """A file of a repository, downloaded or from the cache; filters that are too large are not.

    ``wanted`` are some of :data:`HUB_ARGUMENTS`.
    """
    try:
        hub = hub_library(f"{name!r} is no folder here; reading it from the Hub")
    except ImportError as error:
        raise FileNotFoundError(str(error)) from error
    try:
        if file in (FILE, OLD_DESCRIPTION):
            size = hub.hf_hub_download(name, file, dry_run=True, **wanted).file_size
            _check_size(size, f"{file} of {name}")
        found = Path(hub.hf_hub_download(name, file, **wanted))
        if file == FILE and _description_in(_read(found), found) is None:
            download(name, wanted, OLD_DESCRIPTION)
    # an OSError: no such repository, revision or file, no access, no connection
    except (OSError, hub.errors.HFValidationError) as error:
        where = f"{name} at {wanted['revision']!r}" if wanted.get("revision") else name
        if wanted.get("subfolder"):
            where += f", subfolder {wanted['subfolder']!r},"
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"{where} is neither a folder here, nor can {file} be read from the Hub: "
            f"{type(error).__name__}: {reason:.300}"
        ) from error
    return found
