"""`swell doctor`: collects facts on every host, and checks them here in pure functions."""
