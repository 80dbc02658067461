"""The configuration of Swell: one schema, many YAML files."""
