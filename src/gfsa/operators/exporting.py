"""Whether the caller makes a program of a model, which runs without its Python afterwards."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Whether torch.export or torch.jit.trace runs the model now."""
    # torch.compiler.is_exporting is true in everything that dynamo traces; torch 2.6 has neither
    return torch.jit.is_tracing() or bool(getattr(torch.compiler, "_is_exporting_flag", False))
