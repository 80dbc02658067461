"""Typed JSON bodies, and how they are read."""
