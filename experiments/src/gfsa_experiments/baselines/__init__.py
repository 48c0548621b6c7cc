"""Baselines: other methods against oversmoothing, applied to the same models, to compare with.

.. code-block:: python

    report = gfsa.baselines.apply(model, "contranorm", scale=0.005)
    gfsa.baselines.remove(model)
"""

from gfsa_experiments.baselines.apply import BaselineReport, apply, parameters_of, remove
from gfsa_experiments.baselines.blocks import Anatomy, Place, register_block
from gfsa_experiments.baselines.methods import (
    METHODS,
    AttnScale,
    ContraNorm,
    FeatScale,
    LayerScale,
    Method,
    NeuTRENO,
)

__all__ = [
    "METHODS",
    "Anatomy",
    "AttnScale",
    "BaselineReport",
    "ContraNorm",
    "FeatScale",
    "LayerScale",
    "Method",
    "NeuTRENO",
    "Place",
    "apply",
    "parameters_of",
    "register_block",
    "remove",
]
