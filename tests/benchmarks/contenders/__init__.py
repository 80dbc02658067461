"""Programs that compute on request: each runs in the interpreter of what it measures."""
