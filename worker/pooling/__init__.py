"""Makes vectors and scores from hidden states, for pooling models."""
