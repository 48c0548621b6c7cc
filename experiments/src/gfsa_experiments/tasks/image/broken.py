"""Which images of a folder cannot be read, found before training and without decoding them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from gfsa_experiments.data.files import cache_folder
from gfsa_experiments.engine.whole_files import write_text
from gfsa_experiments.tasks.image.items import list_images, read_image

# threads wait for the disk most of the time
_THREADS = 16
_SHOWN = 10
# what the last bytes of a whole file have in them; a file without it may have been cut off
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_LAST_BYTES = 64


def refuse_broken(root: Path, holdout: float) -> None:
    """Raise ValueError if images of :func:`list_images` cannot be read; it names the first ten."""
    broken, total = _broken(root, holdout)
    if not broken:
        return
    shown = "; ".join(broken[:_SHOWN])
    more = f"; and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
    raise ValueError(
        f"{len(broken)} of {total} images in {root} cannot be read: {shown}{more}. Replace or "
        "delete them"
    )


@functools.lru_cache(maxsize=4)
def _broken(root: Path, holdout: float) -> tuple[Sequence[str], int]:
    """``PATH (reason)`` of each broken image, in the order of names; how many images there are.

    Every run of ``--jobs``, and every process of a run on several GPUs, asks: the first one looks
    and the others wait for what it keeps.
    """
    files = sorted(path for part in list_images(root, holdout).parts.values() for path, _ in part)
    # of the bytes: names of files need not be UTF-8
    kept = cache_folder() / f"images-{sha256(os.fsencode(root.absolute())).hexdigest()[:16]}.json"
    with ThreadPoolExecutor(_THREADS) as pool:
        # before the lock: on a network drive this takes seconds, in every process
        state = _state(pool.map(_size_and_time, files), files)
        with _one_at_a_time(kept):
            # what failed is looked at again: permissions, or a drive, may have been the reason
            suspects = _read(kept, state)
            suspects = files if suspects is None else suspects
            reasons = dict(zip(suspects, pool.map(reason_against, suspects), strict=True))
            broken = {path: reason for path, reason in reasons.items() if reason is not None}
            if suspects is files:
                with contextlib.suppress(OSError):
                    write_text(kept, json.dumps({"state": state, "broken_files": list(broken)}))
    named = [f"{os.path.relpath(path, root)} ({reason})" for path, reason in broken.items()]
    return named, len(files)


@contextlib.contextmanager
def _one_at_a_time(kept: Path) -> Iterator[None]:
    """Keep other processes out, as long as the folder can be written to."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(kept.with_suffix(".lock")))
        yield


def _read(kept: Path, state: str) -> list[str] | None:
    """The broken files that were found in this state; None if they are not known."""
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        return [str(entry) for entry in found["broken_files"]] if found["state"] == state else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _state(stats: Iterable[tuple[int, int]], files: Sequence[str]) -> str:
    """A digest of what the answer depends on: the files, and the Pillow that opens them."""
    import PIL

    digest = sha256(PIL.__version__.encode())
    for path, (size, time) in zip(files, stats, strict=True):
        digest.update(f"{path}\0{size}\0{time}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def reason_against(path: str) -> str | None:
    """Why a file is no image, by its header and its last bytes; None if it seems to be one.

    A file whose end is missing is decoded: some programs write more bytes behind the end.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        size = os.path.getsize(path)
        if not size:
            return "it is empty"
        with open(path, "rb") as file, Image.open(file) as image:
            end = _ENDS.get(image.format or "")
            file.seek(max(0, size - _LAST_BYTES))
            seems_whole = end is None or end in file.read()
        if not seems_whole:
            read_image(path)
    except UnidentifiedImageError:
        return "no format that Pillow knows"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return str(error)
    return None
