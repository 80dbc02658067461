"""Bugs and mutants that random schedules must find."""
