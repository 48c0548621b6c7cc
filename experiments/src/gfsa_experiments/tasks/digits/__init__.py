"""Digits: a task that needs no files, small enough for the demo."""
