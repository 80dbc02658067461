"""Text processing, the HTTP API, and the placement of engines."""
