"""Saves and loads weights in the form in which each worker holds them. `configs/sharded_index.py`
describes the files."""
