"""Where ids are drawn from that are sent to clients."""

from __future__ import annotations

from random import SystemRandom

SYSTEM_RANDOM = SystemRandom()
"""Its ids cannot be guessed. An answer that must be the same when it is computed again draws its
ids from a seeded `Random` instead."""
