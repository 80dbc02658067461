"""Adapters, draft heads and small models for tests."""
