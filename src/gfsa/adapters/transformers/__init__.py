"""Everything about transformers: its adapter, attention maps, caches and checkpoints."""
