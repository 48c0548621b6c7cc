"""The two files of saved filters: written together or not at all, and read as one save.

``filters.safetensors`` holds the numbers, ``filters.json`` the description with a digest of both.
Each file is written under a temporary name, synchronised to the disk and renamed; a lock on the
folder keeps writers apart, and readers from seeing the files of two saves. The description is
renamed first: a program that is killed before the second rename leaves the digest of its tensors,
and the reader finds them under their temporary name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from gfsa.plugs.saved_folders import other_loader

try:
    import fcntl
except ImportError:  # pragma: no cover  (Windows: the digest still detects a mixture)
    fcntl = None  # type: ignore[assignment]

TENSORS = "filters.safetensors"
DESCRIPTION = "filters.json"
DIGEST = "sha256"
"""The field of the description with the digest; files of older versions have none."""

# filters are a few numbers per head: a larger file is not one of ours
MOST_TENSORS = 64 * 2**20
MOST_DESCRIPTION = 4 * 2**20

# seconds; a lock is held for the time of writing two small files
_MOST_WAITING = 10.0


def write_files(folder: Path, description: Mapping[str, Any], tensors: bytes) -> None:
    """Write one save into ``folder``, which is made if it does not exist.

    Until both files are complete on the disk, an earlier save in the folder stays as it is.
    """
    digest = _digest(description, tensors)
    text = json.dumps({**description, DIGEST: digest}, indent=2) + "\n"
    new_folders = _make(folder)
    try:
        with _Lock(folder, exclusive=True) as lock:
            # the description first: it has a digest, which files of older versions have not
            _replace(folder, {DESCRIPTION: text.encode(), TENSORS: tensors})
            if lock.held:
                # files of killed saves: until now they may have been the last complete save
                _unlink(folder.glob(".filters.*.tmp"))
    except BaseException:
        # remove the folders that were made for this save
        for new_folder in new_folders:
            with contextlib.suppress(OSError):
                new_folder.rmdir()
        raise


class FilterFiles:
    """One save, opened for reading: later saves into the folder do not change what is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = contextlib.ExitStack()
        self._description: dict[str, Any] | None = None

    def __enter__(self) -> FilterFiles:
        _check_exists(self.folder / DESCRIPTION)
        with _Lock(self.folder, exclusive=False):
            if not self._unfinished():
                _check_exists(self.folder / TENSORS)
            self._json = self._open(DESCRIPTION)
            # a first save that was killed between its renames has none
            self._numbers = self._open(TENSORS) if (self.folder / TENSORS).is_file() else None
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def _open(self, name: str) -> BinaryIO:
        return self._files.enter_context((self.folder / name).open("rb"))

    def _unfinished(self) -> list[Path]:
        """The tensors of saves that were killed, or are being written now."""
        return [file for file in self.folder.glob(f".{TENSORS}.*.tmp") if file.is_file()]

    def description(self) -> dict[str, Any]:
        """The description, as a JSON object of any content."""
        file = self.folder / DESCRIPTION
        content = _read(self._json, file, MOST_DESCRIPTION)
        try:
            description = json.loads(
                content, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
            )
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is damaged: {error}; save the filters again") from error
        if not isinstance(description, dict):
            raise ValueError(
                f"{file} must be a JSON object that describes filters, got "
                f"{type(description).__name__}; save the filters again"
            )
        self._description = description
        return description

    def tensors(self, most_bytes: int) -> dict[str, Tensor]:
        """The tensors, if they belong to the description, which has to be read first.

        Args:
            most_bytes: what the file of the described filters can have at most.
        """
        most = min(most_bytes, MOST_TENSORS)
        finished = self._finished(most)
        if finished is not None:
            return _parse(*finished)
        file = self.folder / TENSORS
        if self._numbers is None:
            raise ValueError(
                f"{file} does not exist, and no file that a killed save left beside it is what "
                f"{DESCRIPTION} was saved with; save the filters again"
            )
        content = _read(self._numbers, file, most)
        if not self._belongs(content):
            raise ValueError(
                f"{file} is damaged, or is not what {DESCRIPTION} was saved with: their digest is "
                "another. A save may have been interrupted between its two files, or one file "
                f"copied or changed without the other; save the filters again (to load a "
                f"description that you changed yourself, delete its {DIGEST!r})"
            )
        return _parse(content, file)

    def _finished(self, most: int) -> tuple[bytes, Path] | None:
        """The tensors of a save that was killed after its description was renamed; reads only."""
        assert self._description is not None
        if DIGEST in self._description:
            for file in self._unfinished():
                # another process may remove it
                with contextlib.suppress(OSError), file.open("rb") as opened:
                    content = opened.read(most + 1)
                    if len(content) <= most and self._belongs(content):
                        return content, file
        return None

    def _belongs(self, content: bytes) -> bool:
        """Whether the description was saved with these tensors, as far as it says."""
        assert self._description is not None
        own = {key: value for key, value in self._description.items() if key != DIGEST}
        return DIGEST not in self._description or self._description[DIGEST] == _digest(own, content)


def _digest(description: Mapping[str, Any], tensors: bytes) -> str:
    """Of the description's content, however it is laid out, and of the tensors' bytes."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode() + b"\n" + tensors).hexdigest()


def _parse(content: bytes, file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content)
    # beside its own error, dtypes that torch does not have and shapes beyond its range
    except (SafetensorError, KeyError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{file} is damaged: {error!s:.200}; save the filters again") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _check_exists(file: Path) -> None:
    if not file.is_file():
        advice = other_loader(file.parent, "gfsa.load") or "gfsa.save writes it"
        raise FileNotFoundError(f"{file} does not exist; {advice}")


def _read(opened: BinaryIO, file: Path, most_bytes: int) -> bytes:
    size = os.fstat(opened.fileno()).st_size
    if size > most_bytes:
        raise ValueError(
            f"{file} has {size} bytes; filters are a few numbers per head, more than {most_bytes} "
            "is refused"
        )
    return opened.read(most_bytes)


def _make(folder: Path) -> list[Path]:
    """Make a folder and what is missing above it; returns the new folders, innermost first."""
    missing = []
    for path in (folder, *folder.parents):
        if path.exists():
            break
        missing.append(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise type(error)(f"{folder} cannot be a folder: {_obstacle(folder)}") from error
    return missing


def _obstacle(path: Path) -> str:
    """What stands in the place of a folder on the way to ``path``: a file, a device, a link."""
    for part in (*reversed(path.parents), path):
        # a link that leads nowhere does not exist, and is in the way all the same
        if not part.is_dir() and (part.exists() or part.is_symlink()):
            kind = "a file" if part.is_file() else "no folder" if part.exists() else "a broken link"
            return f"{part} is {kind}"
    return "something in its place has been removed meanwhile; try again"


def _replace(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Give ``folder`` these files: all of them on the disk first, then renamed."""
    for name in contents:
        if (folder / name).is_dir():
            raise IsADirectoryError(
                f"{folder / name} is a folder; filters are saved as files. Remove it, or save into "
                "another folder"
            )
    owner = f"{os.getpid()}-{threading.get_ident()}"
    temporary = {folder / name: folder / f".{name}.{owner}.tmp" for name in contents}
    try:
        for file, new in temporary.items():
            _write(new, contents[file.name])
    except BaseException:
        _unlink(temporary.values())
        raise
    first = next(iter(temporary.values()))
    try:
        for file, new in temporary.items():
            os.replace(new, file)
    except Exception:
        # once the new description is in place, its tensors may still have the temporary name, from
        # which load reads them
        if first.exists():
            _unlink(temporary.values())
        raise
    except BaseException:
        # Ctrl-C: both files are complete, so the save is finished before the program ends
        for file, new in temporary.items():
            if new.exists():
                os.replace(new, file)
        raise
    _synchronise(folder)


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _unlink(files: Iterable[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def _synchronise(folder: Path) -> None:
    """Bring the new names to the disk, where the system can do that for a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Lock:
    """A lock on a folder, which ends with the process that holds it.

    Some systems have no locks, and a process that holds one may hang: then ``held`` is false, and
    the digest detects files of two saves.
    """

    def __init__(self, folder: Path, exclusive: bool) -> None:
        self._descriptors: list[int] = []
        self.held = False
        self._folder = folder
        self._exclusive = exclusive

    def __enter__(self) -> _Lock:
        if fcntl is None:
            return self
        kind = fcntl.LOCK_EX if self._exclusive else fcntl.LOCK_SH
        give_up = time.monotonic() + _MOST_WAITING
        with contextlib.suppress(OSError):
            self._descriptors.append(os.open(self._folder, os.O_RDONLY))
            while not self.held and time.monotonic() < give_up:
                try:
                    fcntl.flock(self._descriptors[0], kind | fcntl.LOCK_NB)
                    self.held = True
                except BlockingIOError:
                    time.sleep(0.002)
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def __del__(self) -> None:
        # where Ctrl-C came before __exit__
        self._close()

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
