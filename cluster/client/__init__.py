"""All engines as one: request state, links, routing, output processing."""
