"""Cases: one shape with several variants of the same computation."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# calls are repeated within a sample until it is this long: clocks and launches are noisy
SHORTEST_SAMPLE_MS = 10.0
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """Batch, heads, tokens and head dim, written ``BxHxNxD``.

    ``32/8`` heads are 32 of queries over 8 of keys and values. ``:causal``, ``:padded`` and
    ``:dropout=0.2`` may follow, in this order; padded sequences have half to all of the tokens.
    """

    batch: int
    heads: int
    tokens: int
    dim: int
    causal: bool = False
    padded: bool = False
    key_heads: int | None = None
    """Heads of keys and values where they are fewer than ``heads``."""
    dropout: float = 0.0
    """The share of the map's entries that is dropped."""

    @classmethod
    def parse(cls, text: str) -> Shape:
        pattern = r"(\d+)x(\d+)(?:/(\d+))?x(\d+)x(\d+)(:causal)?(:padded)?(?::dropout=(0?\.\d+))?"
        match = re.fullmatch(pattern, text.strip())
        if match is None or "0" in match.groups()[:5]:
            raise ValueError(
                f"expected a shape as BATCHxHEADSxTOKENSxDIM, such as 1x12x1024x64, "
                f"8x32/8x1024x64:causal, 32x12x128x64:padded or 32x4x256x64:causal:dropout=0.2, "
                f"got {text!r}"
            )
        batch, heads, tokens, dim = (int(match[group]) for group in (1, 2, 4, 5))
        key_heads = None if match[3] is None else int(match[3])
        if key_heads is not None and (heads % key_heads or heads == key_heads):
            raise ValueError(
                f"expected fewer heads of keys that divide the heads of queries, such as 32/8, "
                f"got {heads}/{key_heads} in the shape {text!r}"
            )
        options = (match[6] is not None, match[7] is not None, key_heads, float(match[8] or 0))
        return cls(batch, heads, tokens, dim, *options)

    def __str__(self) -> str:
        options = ":causal" * self.causal + ":padded" * self.padded
        if self.dropout:
            options += f":dropout={self.dropout:g}"
        grouped = "" if self.key_heads is None else f"/{self.key_heads}"
        return f"{self.batch}x{self.heads}{grouped}x{self.tokens}x{self.dim}{options}"

    def real_tokens(self) -> Tensor:
        """``(batch, tokens)``, False for padding."""
        lengths = torch.linspace(self.tokens, (self.tokens + 1) // 2, self.batch).round()
        return torch.arange(self.tokens) < lengths[:, None]


Compiled = Literal["model", "blocks"]
"""Which part of a model is compiled: the whole, or each of its blocks separately."""


@dataclass(frozen=True)
class Setting:
    """Device, precision and execution mode of a case."""

    device: torch.device
    dtype: torch.dtype
    compiled: Compiled | None = None
    graphs: bool = False
    """Whether replays of CUDA graphs are timed instead of launches."""

    def __post_init__(self) -> None:
        if self.graphs and self.device.type != "cuda":
            raise ValueError(f"graphs are for CUDA, got the device {self.device}")
        if self.graphs and self.compiled:
            raise ValueError("--graphs and --compile exclude each other; choose one")

    @property
    def timing(self) -> str:
        """The execution mode in a word or two."""
        compiled = {None: "eager", "model": "compiled", "blocks": "compiled blocks"}
        return "graph" if self.graphs else compiled[self.compiled]

    def autocast(self) -> torch.autocast:
        """Autocast to the dtype; it knows no float32, in which everything runs as it is."""
        low = self.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.device.type, self.dtype if low else None, enabled=low)

    def randn(self, *shape: int) -> Tensor:
        # drawn on the CPU for the same numbers on every device
        return torch.randn(*shape).to(device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class Variant:
    """One way to do the computation.

    Args:
        name: its name in tables.
        backend: the operator of gfsa that ran, or ``"torch"``.
        forward: one forward without gradients.
        step: one forward and backward, with gradients of every input; ``None`` where there is no
            backward, as in decoding.
    """

    name: str
    backend: str
    forward: Callable[[], object]
    step: Callable[[], object] | None


@dataclass(frozen=True)
class Case:
    """Several variants on one shape; the others are compared with the first."""

    shape: str
    variants: Sequence[Variant]
    sample_ms: float = SHORTEST_SAMPLE_MS
    """How long a variant is repeated in its turn, at least."""


def variant(
    name: str, backend: str, function: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> Variant:
    """A variant from a function of tensors: ``forward`` calls it, ``step`` differentiates it.

    Nothing is computed before the first of these calls: a variant that is not measured may be one
    that does not fit into memory.
    """

    @functools.cache
    def upstream() -> Tensor:
        with torch.no_grad():
            return torch.randn_like(function(*inputs))

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    def step() -> Sequence[Tensor]:
        return torch.autograd.grad(function(*inputs), inputs, upstream())

    return Variant(name, backend, forward, step)


def deterministic(variant: Variant) -> Variant:
    """A variant whose calls run under ``torch.use_deterministic_algorithms(True)``.

    Torch then writes into memory that it allocates, too, which is part of what users pay for it.
    """

    def within(work: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True)
            try:
                return work()
            finally:
                torch.use_deterministic_algorithms(before)

        return run

    step = None if variant.step is None else within(variant.step)
    return Variant(variant.name, variant.backend, within(variant.forward), step)
