"""Knobs: one schema, many YAML files."""
