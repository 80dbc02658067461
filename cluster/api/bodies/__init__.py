"""Reads requests: typed bodies, their common fields, and HTTP errors."""
