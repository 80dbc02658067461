"""Runs the tests under load, in processes that stall at random: `python -m tests.loaded`.

A test whose result differs here depends on the speed of the machine, or has found a race.
"""
