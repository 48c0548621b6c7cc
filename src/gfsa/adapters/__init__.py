"""Adapters of the frameworks: one file or folder each, imported when its framework is."""
