"""One step: rows, slots, block tables, KV cache and the forward pass."""
