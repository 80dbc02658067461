"""Settings of the whole test session."""

from swell.configs.process import sleep_at_barriers

sleep_at_barriers()
