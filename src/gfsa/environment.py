"""The environment of a measurement: versions, device, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import gfsa

PACKAGES = (
    *("triton", "transformers", "timm", "torch-geometric"),
    *("speechbrain", "peft", "accelerate"),
)


def versions() -> dict[str, str | None]:
    """Name → version, None if absent; only torch is imported for this."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "gfsa": gfsa.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA (torch's build)": torch.version.cuda,
        "cuDNN": None if cudnn is None else str(cudnn),
        **{name: version_of(name) for name in PACKAGES},
    }


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> dict[str, str | None]:
    """Device → what it is."""
    found: dict[str, str | None] = {"cpu": device_name(torch.device("cpu"))}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}"
        )
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    return found


def device_name(device: torch.device) -> str:
    """The name of a GPU; of a CPU its cores, and the threads that torch uses, too."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({os.cpu_count()} cores), {torch.get_num_threads()} threads"


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
