"""How checkpoints declare that they are quantized, and what is not supported."""
