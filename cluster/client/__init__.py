"""Presents all engines as one: request state, connections, routing, output processing."""
