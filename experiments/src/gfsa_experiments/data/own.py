"""The user's own data (``data=``): find it, name it, and show the first lines of a wrong file.

Every recipe takes ``data=``: the path of a file or folder, or ``hub:ID`` (``hub:ID:CONFIGURATION``)
for a data set of the Hugging Face hub.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

HUB = "hub:"
PACKED = (".xz", ".gz")
_NOT_UNPACKED = (".zst", ".bz2", ".zip", ".7z", ".tar", ".tgz")
_OPENERS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}
_UNREADABLE = (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile)
_SHOWN_ENTRIES = 8


def name_of(data: str) -> str:
    """The name of the data in rows: of ``reviews/my.csv.gz`` it is ``my``, of hub data its ID's."""
    if data.startswith(HUB):
        identity, _, configuration = data.removeprefix(HUB).partition(":")
        words = [identity.rstrip("/").rpartition("/")[2], configuration]
        name = "-".join(word for word in words if word)
    else:
        # symbolic links are not resolved; "." is a folder with a name too
        name = os.path.basename(os.path.abspath(os.path.expanduser(data)))
        for packed in PACKED:
            name = name.removesuffix(packed)
        name = re.sub(r"(?<=.)\.[A-Za-z]\w*$", "", name)
    # a blank would end the name in a table
    return re.sub(r"\s+", "_", name.strip())


def find_own(data: str, data_dir: Path, expected: str = "a file or folder") -> Path:
    """The file or folder that ``data`` names: below ``data_dir``, or a path of its own."""
    # not Path.expanduser, which raises for a user that the machine does not know
    own = Path(os.path.expanduser(data))
    for path in (data_dir / data, own):
        if path.exists():
            return path
    raise FileNotFoundError(
        f"there is no {data} in {data_dir.absolute()}, nor a file or folder of that path; "
        f"set data= to {expected}, or give --data-dir{entries_of(own.parent)}"
    )


def digest_of(pieces: Iterable[str | bytes]) -> str:
    """A hash of all pieces in their order, and of where one ends and the next begins."""
    digest = sha256()
    for piece in pieces:
        # JSON may have halves of surrogate pairs
        content = piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece
        digest.update(b"%d:" % len(content))
        digest.update(content)
    return digest.hexdigest()[:16]


def entries_of(folder: Path) -> str:
    """``. FOLDER has a, b, …``: a sentence to follow an error; empty if there is no such folder."""
    if not folder.is_dir():
        return ""
    names = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir() if p.name[0] != ".")
    shown = ", ".join(names[:_SHOWN_ENTRIES]) + (", …" if len(names) > _SHOWN_ENTRIES else "")
    return f". {folder.absolute()} has {shown or 'nothing in it'}"


def text_of(path: Path) -> str:
    """The text of a file, packed or not; a byte order mark is left out."""
    try:
        data = _OPENERS.get(path.suffix.lower(), bytes)(path.read_bytes())
    except _UNREADABLE as error:
        raise ValueError(f"{path} is damaged, or not packed as its name says ({error})") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        todo = "Save it as UTF-8"
        if path.suffix.lower() in _NOT_UNPACKED:
            todo = f"Unpack it; {' and '.join(PACKED)} are read packed"
        raise ValueError(
            f"{path} is damaged, or no UTF-8 text ({error}); it begins with {data[:16]!r}. {todo}"
        ) from error


def ending_of(path: Path) -> str:
    """The ending that says what a file is: ``.csv`` of ``reviews.csv.gz``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_hidden(path: Path, root: Path) -> bool:
    """Whether a file, or a folder between it and ``root``, has a name that begins with a dot."""
    return any(word.startswith(".") for word in path.relative_to(root).parts)
