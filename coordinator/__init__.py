"""Counts: ranks, epochs, loads, waves; and the channel between processes."""
