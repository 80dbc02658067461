"""The virtual clock and the processes that run on it."""
