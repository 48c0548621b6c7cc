"""Checks of plugged layers: that they are self-attention, that filters run, that they train."""
