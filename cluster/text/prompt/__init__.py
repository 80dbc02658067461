"""Requests become prompts: chat templates, tokenizing, truncation."""
