"""Bodies of requests: how they are read, the fields that requests and answers of several routes
share, and HTTP errors."""
