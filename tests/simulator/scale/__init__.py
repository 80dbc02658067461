"""The cost of the control plane at scale, on the virtual clock with measured CPU time."""
