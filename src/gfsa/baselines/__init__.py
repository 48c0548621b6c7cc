"""Other methods against oversmoothing, put into the same models the same way, to compare with.

.. code-block:: python

    report = gfsa.baselines.apply(model, "contranorm", scale=0.005)
    gfsa.baselines.remove(model)
"""

from gfsa.baselines.apply import BaselineReport, apply, parameters_of, remove
from gfsa.baselines.attnscale import AttnScale
from gfsa.baselines.neutreno import NeuTRENO
from gfsa.baselines.registry import METHODS, Method
from gfsa.baselines.token_methods import ContraNorm, FeatScale, LayerScale

__all__ = [
    "METHODS",
    "AttnScale",
    "BaselineReport",
    "ContraNorm",
    "FeatScale",
    "LayerScale",
    "Method",
    "NeuTRENO",
    "apply",
    "parameters_of",
    "remove",
]
