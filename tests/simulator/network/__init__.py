"""The network between processes, and channels over it."""
