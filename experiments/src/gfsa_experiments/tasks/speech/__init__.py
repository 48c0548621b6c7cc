"""The recipe for speech: its settings, models, loss and search."""
