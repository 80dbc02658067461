"""Keeps engines and the coordinator alive."""
