"""Decides each step: which requests compute how many tokens, and which drafts."""
