"""Encrypted channels between processes: addresses, keys, frames and calls."""
