"""Which images of a folder cannot be read, found before training and without decoding them."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    """``PATH (reason)`` of each broken image, in the order of names; how many images there are."""
    files = sorted(path for part in list_images(root, holdout).parts.values() for path, _ in part)
    with ThreadPoolExecutor(_THREADS) as pool:
        reasons = pool.map(reason_against, files)
        broken = [
            f"{os.path.relpath(path, root)} ({reason})"
            for path, reason in zip(files, reasons, strict=True)
            if reason is not None
        ]
    return broken, len(files)


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
