"""Readers for data sets in their official file formats."""
