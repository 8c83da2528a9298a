"""Making model files: activation importance, codes, conversion."""
