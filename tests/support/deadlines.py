"""The deadline of tests that wait for other processes."""

from __future__ import annotations

HANG_S = 600.0
"""A test that has waited this long for an event fails instead of hanging. On a quiet machine these
events take seconds. Next to a load of 40 some of them took four minutes."""
