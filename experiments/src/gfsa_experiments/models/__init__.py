"""Models that no maintained library carries, written from their papers' formulas.

They take filters like any other model: ``gfsa.plug(gfsa.models.Graphormer.slim())``.
"""

from gfsa_experiments.models.graphormer import Graphormer, GraphormerBatch, GraphormerCollator

__all__ = ["Graphormer", "GraphormerBatch", "GraphormerCollator"]
