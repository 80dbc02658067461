"""Faults of hosts and links, with hosts made of network namespaces."""
