"""``gfsa info``: versions, devices, operators; ``gfsa info MODEL``: what plug would do to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gfsa.kernels.routes import Decision

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "timm",
    "torch-geometric",
    "speechbrain",
    "peft",
    "accelerate",
)


@dataclass(frozen=True)
class Availability:
    """Whether an operator serves an ordinary call on a device, and if not, why not."""

    operator: str
    device: str
    refusal: str | None


def info(
    model: Annotated[
        str,
        typer.Argument(
            help="A timm architecture, a transformers model type, or a folder with a config.json."
        ),
    ] = "",
    trace: Annotated[
        bool, typer.Option("--trace", help="Also attention that no adapter knows.")
    ] = False,
) -> None:
    """Print versions, devices and operators; or, given a model, what plug would do to it."""
    from rich.console import Console
    from rich.table import Table

    if model:
        from gfsa.plugs.preview import describe, is_saved_with_filters

        try:
            report = describe(model, unknown="trace" if trace else "refuse")
            has_filters = is_saved_with_filters(model)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        typer.echo(report)
        if has_filters:
            typer.echo(
                f"{model} has filters already, which gfsa.from_pretrained loads; the lines above "
                "are for a model of its config without them"
            )
        return

    console = Console()
    versions_table = Table(title="versions", title_justify="left", show_header=False)
    for name, version in versions().items():
        versions_table.add_row(name, version or "[dim]absent[/dim]")
    console.print(versions_table)

    devices_table = Table(title="devices", title_justify="left", show_header=False)
    for name, description in devices().items():
        devices_table.add_row(name, description)
    console.print(devices_table)

    operators_table = Table(title="operators", title_justify="left")
    for heading in ("operator", "device", "runs here"):
        operators_table.add_column(heading)
    for found in operators():
        answer = "yes" if found.refusal is None else f"no: {found.refusal}"
        operators_table.add_row(found.operator, found.device, answer)
    console.print(operators_table)
    for call, decision in decisions().items():
        console.print(f"{call}: {decision}", highlight=False)


def versions() -> dict[str, str | None]:
    """Name → version, None if absent; only torch is imported for this."""
    import platform

    import torch

    import gfsa
    from gfsa.environment import version_of

    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "gfsa": gfsa.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA (torch's build)": torch.version.cuda,
        "cuDNN": None if cudnn is None else str(cudnn),
        **{name: version_of(name) for name in PACKAGES if name != "torch"},
    }


def devices() -> dict[str, str]:
    """Device → what it is."""
    import torch

    from gfsa.environment import device_name

    found = {"cpu": device_name(torch.device("cpu"))}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}"
        )
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    return found


def operators() -> list[Availability]:
    """Whether each operator serves a small ordinary call on each kind of device."""
    import torch

    from gfsa.functional import which_backend

    answers = []
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        # the smallest call that any kernel would take
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        tokens = torch.zeros(1, 1, 64, 64, device=device, dtype=dtype)
        coeffs = torch.tensor([0.0, 1.0, 0.0], device=device)
        for operator in ("dense", "sdpa", "fused"):
            try:
                which_backend(tokens, tokens, tokens, coeffs, backend=operator)
                refusal = None
            except ValueError as error:
                refusal = str(error).partition(": ")[2] or str(error)
            answers.append(Availability(operator, device, refusal))
        answers.append(Availability("linear", device, None))
    return answers


def decisions() -> dict[str, Decision]:
    """What ``auto`` runs for training calls on a GPU, as ``which_backend`` says it."""
    import torch

    from gfsa.functional import which_backend

    found: dict[str, Decision] = {}
    if not torch.cuda.is_available():
        # the operators say all there is to say
        return found
    for length, head_dim, causal in ((128, 64, False), (1024, 64, True), (2048, 128, True)):
        # one number stands for all tokens: nothing is computed
        tokens = torch.zeros(1, 1, 1, 1, device="cuda", dtype=torch.bfloat16)
        tokens = tokens.expand(8, 12, length, head_dim)
        for degree in (1, 2):
            coeffs = torch.zeros(degree + 1, device="cuda")
            kind = "causal tokens" if causal else "tokens"
            call = f"degree {degree}, {length} {kind}, head dim {head_dim}"
            found[call] = which_backend(tokens, tokens, tokens, coeffs, is_causal=causal)
    return found
