"""All that touches Ray: actors, placement groups, hosts and checkpoints."""
