"""The choice of an engine for a request."""
