"""The process: logs, secrets, threads, network, control groups."""
