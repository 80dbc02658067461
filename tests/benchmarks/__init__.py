"""Benchmarks with recorded results: `make bench` runs the cases, alone or against peers."""
