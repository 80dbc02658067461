"""Tokens: requests, schedule, KV blocks."""
