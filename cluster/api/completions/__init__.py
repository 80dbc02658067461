"""The route `/v1/completions`."""
