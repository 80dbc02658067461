"""The HTTP server of one ingress: connections, limits, who may send requests."""
