"""The HTTP server of one ingress: connections, limits, and who may send requests."""
