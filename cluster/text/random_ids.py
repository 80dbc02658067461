"""Source of random ids that are sent to clients."""

from __future__ import annotations

from random import SystemRandom

SYSTEM_RANDOM = SystemRandom()
"""Generator of ids that cannot be guessed. An answer that must be the same when it is computed
again uses a seeded `Random` instead."""
