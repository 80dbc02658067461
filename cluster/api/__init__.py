"""HTTP: routes, typed bodies, errors, event streams."""
