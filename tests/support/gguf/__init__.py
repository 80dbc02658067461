"""GGUF files for tests."""
