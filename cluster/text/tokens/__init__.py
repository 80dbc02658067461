"""Tokens become text: tokenizers, detokenizers, stop strings."""
