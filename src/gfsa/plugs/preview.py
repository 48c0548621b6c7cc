"""Preview what plug would do to a model, by the model's name: no weights, no download."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gfsa.plugs.api import plug
from gfsa.plugs.saving.pretrained import read_config
from gfsa.plugs.sites import PlugReport


def describe(name: str, **arguments: Any) -> PlugReport:
    """What ``gfsa.plug(model, **arguments)`` would do to the model called ``name``.

    Args:
        name: a timm architecture (``deit_small_patch16_224``), a transformers model type
            (``bert``), or a folder with a transformers ``config.json``.
        arguments: as in :func:`gfsa.plug`.
    """
    return plug(build(name), dry_run=True, **arguments)


def build(name: str) -> nn.Module:
    """The model on the meta device, where it has shapes but no weights, so any size fits."""
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
