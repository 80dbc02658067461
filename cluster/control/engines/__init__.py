"""Engines as the manager sees them: starts, the fleet, drains and leftovers."""
