"""A real browser and its checks."""
