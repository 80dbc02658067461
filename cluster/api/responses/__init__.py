"""The route `/v1/responses`."""
