"""The requests of this process: state, history and output processing."""
