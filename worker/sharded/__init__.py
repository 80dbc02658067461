"""Saves and loads weights in the form in which each worker holds them.
`configs/files/sharded_index.py` describes the files."""
