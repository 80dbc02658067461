"""The `swell` command."""
