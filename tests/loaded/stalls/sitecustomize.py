"""Stalls this process at random: Python imports this file at start, if PYTHONPATH has its folder.

A thread holds the interpreter's lock while it sleeps. Meanwhile no event loop and no other Python
thread of the process runs, as if the machine were slow or the process swapped out.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time

EVERY_S = 1.5
"""Mean seconds between two stalls."""
STALLS_S = (0.002, 0.02, 0.1, 0.4)
"""Lengths of a stall, in seconds. Each is as likely as the others."""


def stall_forever(chance: random.Random) -> None:
    usleep = ctypes.PyDLL(None).usleep  # a PyDLL keeps the interpreter's lock during a call
    while True:
        time.sleep(chance.expovariate(1 / EVERY_S))
        usleep(int(chance.choice(STALLS_S) * 1e6))


def begin() -> None:
    chance = random.Random(os.urandom(16))
    threading.Thread(target=stall_forever, args=[chance], daemon=True, name="stalls").start()


begin()
os.register_at_fork(after_in_child=begin)
