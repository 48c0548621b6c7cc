"""The recipe for graphs: its settings, models and batches."""
