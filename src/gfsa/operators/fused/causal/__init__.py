"""Causal filters in one sweep over the scores, forward and backward.

Under a causal mask row block i of ``A·U`` needs ``U = A·V`` of the blocks up to i alone. If the
blocks of a head are taken in order, every tile of the scores serves both passes, so the forward
pass takes three matrix products instead of four and the backward pass seven instead of eight.
"""
