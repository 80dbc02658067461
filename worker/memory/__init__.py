"""Memory of a worker: sleep, new weights, KV blocks in host memory and files."""
