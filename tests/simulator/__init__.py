"""Simulates the control plane on a virtual clock: processes, a network that loses messages, and no
threads."""
