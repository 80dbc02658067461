"""What the subcommands of `swell` do."""
