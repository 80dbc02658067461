"""The route `/v1/chat/completions`."""
