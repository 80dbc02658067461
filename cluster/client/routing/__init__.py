"""Decides which engine computes a request, and how many requests may wait."""
