"""Code: detection of defects and clones."""
