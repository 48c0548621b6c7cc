"""``gfsa info``: versions, devices, kernels; ``gfsa info MODEL``: what plug would do to it."""

from __future__ import annotations

import difflib
import importlib.util
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import nn

    from gfsa.kernels.routes import Decision


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
    """Print versions, devices and which kernels run; or, of a model, what plug would do to it.

    Example: gfsa info vit_small_patch16_224
    """
    from rich.console import Console
    from rich.table import Table

    if model:
        from gfsa.plugs import plug
        from gfsa.plugs.saving.pretrained import has_filters

        try:
            report = plug(build(model), dry_run=True, unknown="trace" if trace else "refuse")
            is_plugged = Path(model).is_dir() and has_filters(model)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        typer.echo(report)
        if is_plugged:
            typer.echo(
                f"{model} has filters already, which gfsa.from_pretrained loads; the lines above "
                "are for a model of its config without them"
            )
        return

    from gfsa.environment import devices, versions

    console = Console()
    for title, lines in (("versions", versions()), ("devices", devices())):
        table = Table(title=title, title_justify="left", show_header=False)
        for name, found in lines.items():
            table.add_row(name, found or "[dim]absent[/dim]")
        console.print(table)
    for call, decision in decisions().items():
        console.print(f"{call}: {decision}", highlight=False)


def build(name: str) -> nn.Module:
    """The model on the meta device, where it has shapes but no weights, so any size fits.

    Args:
        name: a timm architecture (``deit_small_patch16_224``), a transformers model type
            (``bert``), or a folder with a transformers ``config.json``.
    """
    import torch

    from gfsa.plugs.saving.pretrained import read_config

    has_timm, has_transformers = map(importlib.util.find_spec, ("timm", "transformers"))
    is_folder = Path(name).is_dir()
    if not has_transformers and (is_folder or not has_timm):
        raise ValueError(f"cannot build {name!r}: pip install timm 'transformers>=5.15'")
    if is_folder:
        return _from_config(read_config(name, local_files_only=True), f"the config of {name}")
    names: list[str] = []
    if has_timm:
        import timm

        if timm.is_model(name):
            with torch.device("meta"):
                model: nn.Module = timm.create_model(name, pretrained=False)
            return model
        names += timm.list_models()
    if has_transformers:
        import transformers

        if name in transformers.CONFIG_MAPPING:
            config = transformers.AutoConfig.for_model(name)
            return _from_config(config, f"the default config of {name!r}")
        names += list(transformers.CONFIG_MAPPING)
    similar = difflib.get_close_matches(name, names, n=3)
    raise ValueError(
        f"{name!r} is not a timm architecture, a transformers model type or a local folder with a "
        "config.json (nothing is downloaded)"
        + (f"; did you mean {', '.join(similar)}?" if similar else "")
    )


def _from_config(config: Any, source: str) -> nn.Module:
    import torch
    import transformers

    try:
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModel.from_config(config)
    except (TypeError, ValueError, AttributeError) as error:
        # the default config of some types is incomplete
        raise ValueError(
            f"no model can be built from {source} ({error}); save a complete config and pass its "
            "folder"
        ) from error
    return model


def decisions() -> dict[str, Decision]:
    """What ``which_backend`` says of training calls on each kind of device."""
    import torch

    from gfsa.functional import which_backend

    # device, dtype, tokens, head dim, whether causal; on a CPU all lengths are served alike
    calls: list[tuple[str, torch.dtype, int, int, bool]] = [("cpu", torch.float32, 128, 64, False)]
    if torch.cuda.is_available():
        sizes = ((128, 64, False), (1024, 64, True), (2048, 128, True))
        calls = [*(("cuda", torch.bfloat16, *size) for size in sizes), *calls]
    found: dict[str, Decision] = {}
    for (device, dtype, length, head_dim, causal), degree in itertools.product(calls, (1, 2)):
        # one number stands for all tokens: nothing is computed
        tokens = torch.zeros(1, 1, 1, 1, device=device, dtype=dtype)
        tokens = tokens.expand(8, 12, length, head_dim)
        coeffs = torch.zeros(degree + 1, device=device)
        kind = "causal tokens" if causal else "tokens"
        call = f"{device}, degree {degree}, {length} {kind}, head dim {head_dim}"
        found[call] = which_backend(tokens, tokens, tokens, coeffs, is_causal=causal)
    return found
