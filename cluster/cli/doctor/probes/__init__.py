"""What the checks look at: facts of a host, and links between hosts."""
