"""Reports of a run for the laws: probes, watches and disturbances."""
