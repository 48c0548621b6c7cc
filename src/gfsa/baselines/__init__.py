"""Other methods against oversmoothing, put into the same models the same way, to compare with.

.. code-block:: python

    report = gfsa.baselines.apply(model, "contranorm", scale=0.005)
    gfsa.baselines.remove(model)
"""

from gfsa.baselines.attnscale import AttnScale
from gfsa.baselines.branches import ContraNorm, FeatScale, LayerScale
from gfsa.baselines.core import BaselineReport, apply, parameters_of, remove
from gfsa.baselines.neutreno import NeuTRENO
from gfsa.baselines.registry import METHODS, Method

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
