"""Weights saved and loaded as each worker holds them; `configs/sharded_index.py` has the files."""
