"""How fast a run trains: tokens a second, and the share of the GPU's peak that the model uses."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

# dense bf16 products, 10¹² operations a second, by a part of the name that torch has for the GPU
_PEAK = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "B200": 2250.0,
}


@dataclass(frozen=True)
class Work:
    """What one training example takes."""

    tokens: int
    flops: float
    """Forward and backward, of the model without any method: what a method adds is no progress."""


def speed(work: Work, examples_per_second: float, peak: float | None) -> dict[str, float]:
    """``tokens_per_second``, and ``mfu`` (model FLOPs utilisation) where the peak is known.

    .. math:: mfu = \\frac{flops \\cdot examples\\ a\\ second}{peak}

    Args:
        work: of one example.
        examples_per_second: over all processes.
        peak: operations a second of all processes' GPUs together; None if unknown.
    """
    found: dict[str, float] = {"tokens_per_second": round(work.tokens * examples_per_second)}
    if peak is None:
        return found
    return found | {"mfu": round(work.flops * examples_per_second / peak, 4)}


def peak_flops(device: torch.device) -> float | None:
    """The most bf16 operations a second that a GPU's maker states; None if it is not listed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for part, peak in _PEAK.items() if part in name), None)


def warn_of_unknown_peak(device: torch.device) -> None:
    """Say why rows and logs have no MFU on this GPU; Python shows it once."""
    if device.type == "cuda" and peak_flops(device) is None:
        warnings.warn(
            f"no MFU is reported: the peak of {torch.cuda.get_device_name(device)} is not known, "
            f"only of {', '.join(_PEAK)}",
            stacklevel=2,
        )


def speed_text(found: dict[str, float]) -> str:
    """``, 812,000 tokens/s, MFU 25 %``"""
    if not found:
        return ""
    share = f", MFU {found['mfu']:.0%}" if "mfu" in found else ""
    return f", {found['tokens_per_second']:,.0f} tokens/s{share}"
