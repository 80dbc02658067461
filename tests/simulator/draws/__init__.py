"""Random campaigns: what goes wrong at which moment."""
