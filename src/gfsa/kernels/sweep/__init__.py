"""The causal filter in one sweep over the keys, in Gluon, for Hopper GPUs."""
