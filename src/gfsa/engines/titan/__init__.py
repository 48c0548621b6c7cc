"""torchtitan: filters in its attention, a rate of their own, checkpoints that keep them.

:mod:`gfsa.titan` has the names that a user writes.
"""
