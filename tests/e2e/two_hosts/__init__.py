"""Clusters of two hosts, which are network namespaces."""
