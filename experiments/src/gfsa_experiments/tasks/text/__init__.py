"""Texts of a caller's own: classes or numbers."""
