"""The cpu backend: compiled C++."""
