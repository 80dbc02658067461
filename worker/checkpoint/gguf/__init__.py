"""Reads the weights of a GGUF file, and dequantizes their blocks."""
