"""Quantized checkpoints: one file for each format, and the matrices that they become."""
