"""What `swell serve` needs until its cluster is ready, and what ends it."""
