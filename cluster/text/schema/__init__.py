"""Typed JSON bodies of requests, and their decoding."""
