"""Reads the weights of a model from safetensors and GGUF files."""
