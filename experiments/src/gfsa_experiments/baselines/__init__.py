"""Baselines: other methods against oversmoothing, applied to the same models, to compare with.

.. code-block:: python

    report = gfsa.baselines.apply(model, "contranorm", scale=0.005)
    gfsa.baselines.remove(model)
"""

from gfsa_experiments.baselines.apply import BaselineReport, apply, parameters_of, remove
from gfsa_experiments.baselines.block_anatomy import Anatomy, Place, register_block
from gfsa_experiments.baselines.map_methods import AttnScale, NeuTRENO
from gfsa_experiments.baselines.registry import METHODS, Method
from gfsa_experiments.baselines.token_methods import ContraNorm, FeatScale, LayerScale

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
