"""Preview what plug would do to a model, by the model's name: no weights, no download."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gfsa.plugs.api import plug
from gfsa.plugs.registry import Unknown
from gfsa.plugs.saving.pretrained import has_filters, read_config
from gfsa.plugs.sites import PlugReport


def describe(name: str, unknown: Unknown = "refuse", **arguments: Any) -> PlugReport:
    """What ``gfsa.plug(model, **arguments)`` would do to the model called ``name``.

    Args:
        name: a timm architecture (``deit_small_patch16_224``), a transformers model type
            (``bert``), or a folder with a transformers ``config.json``.
        unknown, arguments: as in :func:`gfsa.plug`.
    """
    return plug(build(name), unknown=unknown, dry_run=True, **arguments)


def is_saved_with_filters(name: str) -> bool:
    """Whether ``name`` is a folder that was saved from a plugged model."""
    if not Path(name).is_dir():
        return False
    try:
        return has_filters(name)
    except FileNotFoundError:
        # a config without weights, or weights that are not in safetensors, where filters are
        return False


def build(name: str) -> nn.Module:
    """The model on the meta device, where it has shapes but no weights, so any size fits."""
    if Path(name).is_dir():
        _transformers()
        return _from_config(read_config(name, local_files_only=True), f"the config of {name}")
    names: list[str] = []
    if _installed("timm"):
        import timm

        if timm.is_model(name):
            with torch.device("meta"):
                model: nn.Module = timm.create_model(name, pretrained=False)
            return model
        names += timm.list_models()
    if _installed("transformers"):
        types = _transformers().CONFIG_MAPPING
        if name in types:
            config = _transformers().AutoConfig.for_model(name)
            return _from_config(config, f"the default config of {name!r}")
        names += list(types)
    if not names:
        raise ValueError(
            f"cannot build {name!r}: neither timm nor transformers is installed "
            "(pip install timm transformers)"
        )
    similar = difflib.get_close_matches(name, names, n=3)
    raise ValueError(
        f"{name!r} is not a timm architecture, a transformers model type or a local folder with a "
        "config.json (nothing is downloaded)"
        + (f"; did you mean {', '.join(similar)}?" if similar else "")
    )


def _from_config(config: Any, source: str) -> nn.Module:
    try:
        with torch.device("meta"):
            model: nn.Module = _transformers().AutoModel.from_config(config)
    except (TypeError, ValueError, AttributeError) as error:
        # the default config of some types is incomplete
        raise ValueError(
            f"no model can be built from {source} ({error}); save a complete config and pass its "
            "folder"
        ) from error
    return model


def _transformers() -> Any:
    if not _installed("transformers"):
        raise ValueError("this model needs transformers: pip install 'transformers>=5.15'")
    import transformers

    return transformers


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
