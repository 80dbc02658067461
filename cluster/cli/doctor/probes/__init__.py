"""Collects the facts that the checks need: about a host, and about links between hosts."""
