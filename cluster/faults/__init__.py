"""Proof of the promise: whatever single process is lost while answers stream, they stay right."""
