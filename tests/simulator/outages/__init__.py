"""Processes, hosts and links that fail while the cluster serves."""
