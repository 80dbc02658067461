"""The control plane on a virtual clock: processes, a network that loses things, and no threads."""
