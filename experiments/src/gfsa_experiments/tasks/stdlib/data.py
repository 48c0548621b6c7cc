"""The source of Python's standard library as bytes, split by module."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import torch

from gfsa_experiments.engine.task import TensorRows

BYTES = 256
# of ten shares of the modules, one to validate on and one to test on
_SHARES = 10
_HELD_OUT = {0: "valid", 1: "test"}
_PARTS = ("train", "valid", "test")


def source_folder() -> Path:
    """The folder of the standard library of the running Python."""
    return Path(sysconfig.get_path("stdlib"))


def part_of(module: str) -> str:
    """The part that a module belongs to, by its name: the same for every version of Python."""
    return _HELD_OUT.get(int(sha256(module.encode()).hexdigest(), 16) % _SHARES, "train")


@lru_cache(maxsize=2)
def read_parts(folder: Path) -> dict[str, bytes]:
    """The modules of each part (files, not packages), sorted by name, a zero byte between two."""
    found: dict[str, list[bytes]] = {name: [] for name in _PARTS}
    for path in sorted(folder.glob("*.py")):
        found[part_of(path.stem)].append(path.read_bytes())
    if not all(found.values()):
        counts = ", ".join(f"{len(modules)} in {name}" for name, modules in found.items())
        raise FileNotFoundError(
            f"expected the source of Python's standard library in {folder}, found {counts}; this "
            "Python came without it: use another one, or gfsa train pretrain --set data=FOLDER"
        )
    return {name: b"\0".join(modules) for name, modules in found.items()}


def rows_of(text: bytes, block: int, name: str, most: int = 0) -> TensorRows:
    """Rows ``ids (N, block + 1)`` of bytes: the last of a row is the first of the next.

    Args:
        text: all bytes of a part.
        block: how many bytes each row predicts.
        name: of the part.
        most: take so many rows, evenly spaced; 0 for all.
    """
    count = (len(text) - 1) // block
    if count < 1:
        raise ValueError(
            f"the {name} text has {len(text)} bytes, not enough for a row of {block} and the byte "
            "after it; set a smaller block"
        )
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, block + 1, block)
    taken = min(count, most) if most else count
    return TensorRows(ids=rows[torch.arange(taken) * count // taken].contiguous())
