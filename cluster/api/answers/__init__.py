"""Writes answers: whole bodies, event streams, headers and log probabilities."""
