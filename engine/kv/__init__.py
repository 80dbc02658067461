"""KV cache blocks: allocation, prefix hashes, hand-over and offload."""
