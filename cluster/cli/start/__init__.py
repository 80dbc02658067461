"""Steps of `swell serve` that start a cluster and stop it."""
