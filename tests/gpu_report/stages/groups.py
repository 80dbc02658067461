"""Groups of workers: NCCL forms a group of one rank, computes with it, and leaves or aborts it,
many times."""

from __future__ import annotations

import threading
import time
from statistics import median

import torch
import torch.distributed as dist

from swell.worker.comm.connect import connect
from swell.worker.comm.group_secret import GroupSecret
from tests.gpu_report.scale import Figures, Scale

GROUP_S = 30.0


def run(scale: Scale) -> Figures:
    device = scale.pick("cuda:0", "cpu")
    repeats = scale.pick(100, 4)
    seconds, freed = [], []
    for number in range(repeats):
        begun = time.perf_counter()
        secret = GroupSecret(b"report", f"generation{number}/alone")
        transport = connect(device, dist.HashStore(), 0, 1, GROUP_S, threading.Event(), secret)
        seconds.append(time.perf_counter() - begun)
        ones = torch.ones(1, device=device)
        transport.wait_on_host(transport.backend.allreduce([ones]))
        assert ones.item() == 1
        assert not transport.poll(), transport.reason
        if number % 2:
            transport.abort()
        transport.close()
        if scale.is_full:
            torch.cuda.synchronize()
            freed.append(torch.cuda.mem_get_info(0)[0])
    figures: Figures = {"times": repeats, "ms to form": round(median(seconds) * 1e3, 2)}
    if scale.is_full:
        kept = freed[3] - freed[-1]  # the first groups allocate what NCCL keeps
        assert kept < 64 << 20, f"{kept >> 20} MiB were kept by {repeats - 4} groups"
        figures["MiB kept"] = kept >> 20
    return figures
