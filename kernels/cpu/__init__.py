"""Compiled C++ for CPU."""
