"""Dispatch modes of several threads (`swell.kernels.host.dispatch_mode`)."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
import threading
import time

import torch

from swell.kernels.host.dispatch_mode import DispatchMode

make, together = torch._ops.OpOverload.__init__, threading.Barrier(2)

def make_late(self, packet, *args):
    make(self, packet, *args)
    if packet.__name__ == "unflatten":
        time.sleep(0.5)  # the other thread meets the operator

class Found(DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found.append(func)
        return func(*args, **(kwargs or {}))

def compute():
    values = torch.ones(3)
    with torch.inference_mode(), Found():
        together.wait(60)
        values.unflatten(0, (1, 3))

assert "unflatten" not in vars(torch.ops.aten), "the program needs an operator without an object"
found = []
torch._ops.OpOverload.__init__ = make_late
threads = [threading.Thread(target=compute) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 2
assert all(each is torch.ops.aten.unflatten.int for each in found), found
"""


def test_threads_meet_the_same_object_of_an_operator() -> None:
    """Otherwise torch keeps the address of an object that it has freed. The program has a process
    of its own, because torch makes these objects once."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
