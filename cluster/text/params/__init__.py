"""Sampling parameters: their fields and limits."""
