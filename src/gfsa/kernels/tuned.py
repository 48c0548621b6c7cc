"""What ``gfsa tune`` measured on this machine, as ``auto`` reads it.

The file has an entry for each GPU with the versions of torch, Triton and gfsa that were measured.
Without an entry for the present ones (it was deleted, or something was updated), torch's own
kernels serve.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gfsa._version import __version__

FORMAT = 1
LENGTHS = (128, 512, 1024, 4096)
"""Lengths that are measured; a call counts as the next larger one, or as the largest.

These decide: launches at 128, the middle at 512, degree 1 in one pass at its longest, and the
kernels of any length, whose ratio to torch's hardly changes from 4,096 tokens on.
"""
HEAD_DIMS = (64, 128)


class Machine(NamedTuple):
    """Everything that times of kernels depend on, besides their arguments."""

    gpu: str
    torch: str
    triton: str
    gfsa: str = __version__


class Shape(NamedTuple):
    """A kind of call: what the choice between kernels depends on."""

    degree: int
    head_dim: int
    tokens: int
    causal: bool
    masked: bool


SHAPES = [
    Shape(*kind)
    for kind in itertools.product((1, 2), HEAD_DIMS, LENGTHS, (False, True), (False, True))
]
"""The kinds of calls that are measured."""


class Row(NamedTuple):
    """What was measured for a shape: milliseconds of forward and backward, errors to float64."""

    shape: Shape
    fused_ms: float
    torch_ms: float
    fused_error: float
    torch_error: float

    @property
    def is_right(self) -> bool:
        """FlashAttention's rule: at most twice the error of torch's own kernels."""
        return self.fused_error <= 2 * self.torch_error + 1e-5

    @property
    def is_faster(self) -> bool:
        return self.is_right and self.fused_ms < self.torch_ms


def path() -> Path:
    """Where the measurements are: ``GFSA_TUNED``, or ``gfsa/tuned.json`` in the user's cache."""
    named = os.environ.get("GFSA_TUNED")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gfsa" / "tuned.json"


def read(file: Path) -> dict[Machine, dict[Shape, Row]]:
    """The measurements in a file, by machine; none if there is no such file."""
    try:
        # a folder that may not be looked into raises here, as a file that may not be read does
        if not file.exists():
            return {}
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']}, expected {FORMAT}")
        found: dict[Machine, dict[Shape, Row]] = {}
        for entry in content["machines"]:
            rows = found[Machine(**entry["machine"])] = {}
            for row in entry["rows"]:
                shape = Shape(**row["shape"])
                rows[shape] = Row(shape, *(float(row[name]) for name in Row._fields[1:]))
        return found
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(
            f"{file} cannot be read ({error!r}): torch's own kernels serve. Delete it, or run "
            "gfsa tune again",
            stacklevel=2,
        )
        return {}


def write(file: Path, machine: Machine, rows: Sequence[Row], update: bool = False) -> None:
    """Put the measurements of one machine into a file, beside those of others.

    Args:
        update: keep what is known of the machine's other shapes.
    """
    known = read(file)
    kept = known.get(machine, {}) if update else {}
    known[machine] = kept | {row.shape: row for row in rows}
    entries = [
        {
            "machine": machine._asdict(),
            "rows": [row._asdict() | {"shape": shape._asdict()} for shape, row in rows.items()],
        }
        for machine, rows in known.items()
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    # all of it or nothing: another process may read it now
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(json.dumps({"format": FORMAT, "machines": entries}, indent=1), encoding="utf-8")
    part.replace(file)
    _rows.cache_clear()


def this_machine(device: torch.device) -> Machine:
    gpu = torch.cuda.get_device_name(device)
    return Machine(gpu, torch.__version__, importlib.metadata.version("triton"))


def shape_of(degree: int, head_dim: int, length: int, causal: bool, masked: bool) -> Shape:
    """The measured shape that a call counts as."""
    # comparisons rather than arithmetic: to the compiler a length may be a symbol
    tokens = next((most for most in LENGTHS if length <= most), LENGTHS[-1])
    width = next((most for most in HEAD_DIMS if head_dim <= most), HEAD_DIMS[-1])
    return Shape(degree, width, tokens, causal, masked)


def reason_against(
    device: torch.device, degree: int, head_dim: int, tokens: int, causal: bool, masked: bool
) -> str | None:
    """Why torch's kernels serve such a call on this machine, or None if the fused ones do.

    Args:
        head_dim, tokens: those of a :class:`Shape` from :func:`shape_of`.
    """
    rows = _rows(device)
    if rows is None:
        return (
            "the fused kernels are measured on Hopper GPUs with Triton 3.6, and not on this "
            "machine: run gfsa tune"
        )
    row = rows.get(Shape(degree, head_dim, tokens, causal, masked))
    if row is None:
        return "gfsa tune did not measure such a call"
    if not row.is_right:
        return "gfsa tune found the fused kernels less exact than torch's on this GPU"
    return None if row.is_faster else "gfsa tune found torch's kernels faster on this GPU"


# a constant to the compiler, as routes.capability is
reason_against._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _rows(device: torch.device) -> dict[Shape, Row] | None:
    """What was measured on this machine, None if nothing was; read once per process."""
    known = read(path())
    return known.get(this_machine(device)) if known else None
