"""Proof of the promise: whatever is lost while answers stream, one process or several at once, they
stay right."""
