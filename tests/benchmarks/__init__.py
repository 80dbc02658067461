"""Benchmarks with recorded results: `make bench` runs the cases, with or without peers."""
