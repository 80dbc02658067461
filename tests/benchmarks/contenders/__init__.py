"""Programs that compute when told to: each runs in the interpreter of what it measures."""
