"""Code: defects and clones."""
