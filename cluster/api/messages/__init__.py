"""The route `/v1/messages` of Anthropic's API."""
