"""The main job in small: a deep Vision Transformer on digits, with and without graph filters."""
