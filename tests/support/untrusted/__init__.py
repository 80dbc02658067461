"""Peers, accounts and texts that test the protections."""
