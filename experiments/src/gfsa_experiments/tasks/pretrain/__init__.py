"""Pretraining: a decoder from scratch on text."""
