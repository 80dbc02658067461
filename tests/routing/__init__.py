"""Which engine gets a request."""
