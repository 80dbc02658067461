"""The engine works on tokens: requests, scheduling, KV blocks."""
