"""Invariants of every run, and the records by which they are checked."""
