"""Anthropic's HTTP bodies, typed: messages in and out, and what becomes of them in our terms."""
