"""Token mixers that are not softmax attention: hybrids have them beside attention layers.

A filter is a polynomial of an attention map. A state space, a convolution or a Fourier transform
has no such map. The report of ``plug`` names these layers: without them, "plugged 12 layers" would
read as all layers of a model that has 48.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from gfsa.plugs.sites import Site

# class names, and what the layer computes
_KINDS = {
    r"mamba\d*(mixer|block)?$|^mamba\d*$|ssm(layer|block)?$|bambamixer|falconh1mixer": (
        "a state-space layer"
    ),
    r"deltanet|deltaattention|deltarule": "a delta-rule recurrence (linear attention)",
    r"rwkv\w*(attention|time_?mix)|^time_?mix": "a linear recurrence",
    r"lineara(ttention|ttn)$|lightninga(ttention|ttn)$|gated_?linear": "linear attention",
    r"retention$": "a retention layer",
    r"recurrentblock$|rglru|[msx]lstm(layer|cell|block)?$": "a recurrent layer",
    r"shortconv|hyena": "a convolution over tokens",
    r"fouriertransform$|globalfilter$": "a Fourier transform over tokens",
    r"poolformerpooling$|repmixer$": "a fixed or convolutional mix of neighbouring tokens",
}


def token_mixers(model: nn.Module, found: Mapping[str, Site]) -> dict[str, str]:
    """The token mixers of a model that are not attention, by name, with the reason.

    Of nested ones the outermost is named. Modules that contain a site of ``found``, or are part of
    one, are not: those have a line of their own in the report.
    """
    mixers: dict[str, str] = {}
    around = {name[:end] for name in found for end in _ends(name)}
    inside = tuple(f"{name}." for name in found)
    for name, module in model.named_modules():
        if name in around or name.startswith((*inside, *(f"{mixer}." for mixer in mixers))):
            continue
        kind = _kind(type(module).__name__)
        if kind is not None:
            mixers[name] = (
                f"{type(module).__name__} is {kind}, not softmax attention: it has no attention "
                "map that a filter could take powers of"
            )
    return mixers


def _ends(name: str) -> list[int]:
    """Where the names of the modules around and of ``name`` itself end."""
    return [0, *(match.start() for match in re.finditer(r"\.", name)), len(name)]


def _kind(class_name: str) -> str | None:
    name = class_name.lower()
    return next((kind for pattern, kind in _KINDS.items() if re.search(pattern, name)), None)
