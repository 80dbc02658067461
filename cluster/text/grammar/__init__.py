"""Grammars that answers must match: compiled, checked, and made from structured output."""
