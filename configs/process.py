"""What must be set in a process before torch is loaded there."""

from __future__ import annotations

import os


def sleep_at_barriers() -> None:
    """Let OpenMP's threads sleep where they wait for each other, after a very short spin.

    A step passes many barriers. With endless spinning, one thread that lost its core to any other
    process (an ingress, another engine) costs its peers a scheduling quantum at each of them:
    measured on two cores with a little other load, a step of 8 rows took 230 ms spinning and 4 ms
    sleeping. But to wake a thread costs 20-40 us, more than a small product takes; so they spin
    1000 of libgomp's turns first, a few hundred of which already bridge the gap between two
    products. OpenMP reads the variables once, when it is loaded; a value of the user's stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
