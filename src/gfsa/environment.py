"""The environment of a measurement: versions, device, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import gfsa


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({os.cpu_count()} cores)"


def commit() -> str:
    """The commit of the checkout that gfsa runs from, ``-dirty`` if code was edited; else empty.

    ``GFSA_COMMIT`` in the environment tells it where the files were copied without their history.
    """
    if named := os.environ.get("GFSA_COMMIT"):
        return named
    package = Path(gfsa.__file__).resolve().parent
    repository = package.parent.parent
    # an installed copy may lie inside the repository of another project
    if package.parent.name != "src" or not (repository / ".git").exists():
        return ""
    named = _git(repository, "describe", "--always", "--exclude=*")
    # rows that an earlier measurement added to a table do not change what is measured
    code = ("src", "experiments", "benchmarks")
    edited = _git(repository, "diff", "--name-only", "HEAD", "--", *code)
    return f"{named}-dirty" if named and edited else named


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    ran = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    return ran.stdout.strip()
