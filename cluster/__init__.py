"""Text, HTTP, placement."""
