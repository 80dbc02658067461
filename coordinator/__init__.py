"""Counts: ranks, epochs, loads, waves; and the channel by which parts talk."""
