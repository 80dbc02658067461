"""Symmetric memory of torch: two processes on one card add small tensors with one-shot all-reduces.

The product does not use it (docs/design/decisions.md, "All-reduces on GPUs are those of NCCL").
This stage measures what that decision depends on: whether a group forms over a store of its own,
without torch's global group, also if a member has formed more groups than the other; and whether a
kernel that waits for a lost peer can be ended. On a CPU the memory is a file that both processes
map, and a thread computes what the kernel does.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import threading
import time
import traceback
import uuid
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tests.gpu_report.scale import Figures, Scale

MEMBERS = 2
BYTES = 256 << 10
"""The largest tensor."""
FORM_S = 10.0
END_S = 5.0
"""How long a kernel may take to end after its signals were written, in seconds."""


class NumberedStore(dist.Store):
    """Numbers torch's exchanges by group. Torch numbers them by process: after a member was
    replaced, the others would wait for keys with numbers that the new process never sets."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}
        """The number in a key of torch -> the number in the key of this group."""

    def _key(self, key: str) -> str:
        found = re.search(r"SymmetricMemory/(\d+)", key)
        if found is None:
            return key
        number = self._numbers.setdefault(found[1], len(self._numbers))
        return f"{key[: found.start(1)]}{number}{key[found.end(1) :]}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get([self._key(key) for key in keys])


class Memory(ABC):
    """Memory of a group that all its members can write."""

    pads: list[torch.Tensor]
    """[members] int32 [blocks, members]: at each member, a signal of each member for each block. A
    block sets its signal at a member from 0 to 1, and waits there until it is 0; at its own member
    it waits for 1 of each other and sets 0."""

    @abstractmethod
    def all_reduce(self, t: torch.Tensor) -> None:
        """Queues a sum over the members, in place."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether everything that was queued has ended."""

    def close(self) -> None:  # noqa: B027 - a file needs no more than to be forgotten
        """Gives the memory back."""

    def wait(self) -> None:
        deadline = time.monotonic() + END_S
        while not self.is_done():
            assert time.monotonic() < deadline, "the kernel does not end"

    def end_waits(self, rank: int) -> None:
        """Writes signals until everything that was queued has ended, as an abort would have to do
        for a member whose peers are lost."""
        deadline = time.monotonic() + END_S
        while not self.is_done():
            assert time.monotonic() < deadline, "written signals do not end the kernel"
            self.write_signals(rank, 1)

    def write_signals(self, rank: int, arrived: int) -> None:
        """Writes the signals for which a block of this member may wait. Each block sets one signal
        at its own member. This method never writes that one."""
        for member, pad in enumerate(self.pads):
            if member != rank:
                pad[:, rank] = 0
                self.pads[rank][:, member] = arrived


class CardMemory(Memory):
    def __init__(self, store: NumberedStore, rank: int, members: int, _folder: Path) -> None:
        self._name = f"symmetric-{uuid.uuid4()}"
        self._store = store  # torch refers only to its C++ part
        group = c10d.ProcessGroup(store, rank, members)
        group._set_group_name(self._name)
        c10d._register_process_group(self._name, group)
        memory, device = c10d._SymmetricMemory, torch.device("cuda", 0)
        self._buffer = memory.empty_strided_p2p((BYTES,), (1,), torch.uint8, device, self._name)
        met = memory.rendezvous(self._buffer, self._name)
        pads = [met.get_signal_pad(member, [], torch.int32) for member in range(members)]
        self.pads = [pad[: len(pad) // members * members].view(-1, members) for pad in pads]
        self._side = torch.cuda.Stream(device, priority=-1)
        self._reached = torch.cuda.Event()

    def all_reduce(self, t: torch.Tensor) -> None:
        view = self._buffer.view(t.dtype)[: t.numel()].view(t.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(view, t, "sum", self._name, t)
        self._reached.record()

    def is_done(self) -> bool:
        return self._reached.query()

    def write_signals(self, rank: int, arrived: int) -> None:
        with torch.cuda.stream(self._side):
            super().write_signals(rank, arrived)
            self._side.synchronize()

    def close(self) -> None:
        torch.cuda.synchronize()
        c10d._unregister_process_group(self._name)


class HostMemory(Memory):
    _exchanges = 0
    """The exchanges of this process, which torch counts, too."""

    def __init__(self, store: NumberedStore, rank: int, members: int, folder: Path) -> None:
        keys = [f"SymmetricMemory/{HostMemory._exchanges}/{member}" for member in range(members)]
        HostMemory._exchanges += 1
        store.set(keys[rank], folder.name)
        assert {name.decode() for name in store.multi_get(keys)} == {folder.name}
        self._rank = rank
        self._buffers, self.pads = [], []
        for member in range(members):
            buffer, pad = str(folder / f"buffer{member}"), str(folder / f"pad{member}")
            self._buffers.append(torch.from_file(buffer, True, BYTES, dtype=torch.uint8))
            self.pads.append(torch.from_file(pad, True, members, dtype=torch.int32).view(1, -1))
        self._threads: list[threading.Thread] = []

    def all_reduce(self, t: torch.Tensor) -> None:
        self._threads.append(threading.Thread(target=self._compute, args=(t,), daemon=True))
        self._threads[-1].start()

    def _compute(self, t: torch.Tensor) -> None:
        views = [buffer.view(t.dtype)[: t.numel()].view(t.shape) for buffer in self._buffers]
        views[self._rank].copy_(t)
        self._meet()
        t.copy_(torch.stack(views).sum(0))
        self._meet()

    def _meet(self) -> None:
        own = self.pads[self._rank]
        for member, pad in enumerate(self.pads):
            while pad[0, self._rank] != 0:
                time.sleep(1e-5)
            pad[0, self._rank] = 1
            while own[0, member] != 1:
                time.sleep(1e-5)
            own[0, member] = 0

    def is_done(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)


def run(scale: Scale) -> Figures:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="swell-gpu-") as folder:
        members = [
            spawn.Process(target=_member, args=(rank, server.port, folder, scale.is_full, results))
            for rank in range(MEMBERS)
        ]
        for member in members:
            member.start()
        try:
            figures: Figures = {}
            for _ in members:
                found, error = results.get()
                assert not error, error
                figures.update(found)
            return figures
        finally:
            for member in members:
                member.kill()
                member.join()


def _member(rank: int, port: int, folder: str, is_full: bool, results: Any) -> None:
    try:
        results.put((_measure(rank, port, Path(folder), is_full), ""))
    except BaseException:
        results.put(({}, traceback.format_exc()))


def _measure(rank: int, port: int, folder: Path, is_full: bool) -> Figures:
    """Returns the figures of the first member."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0) if is_full else torch.device("cpu")
    make = CardMemory if is_full else HostMemory
    server = dist.TCPStore("127.0.0.1", port, is_master=False)
    server.set_timeout(timedelta(seconds=FORM_S))

    def form(name: str, own_rank: int = rank, members: int = MEMBERS) -> Memory:
        inside = folder / name
        inside.mkdir(exist_ok=True)
        return make(NumberedStore(dist.PrefixStore(name, server)), own_rank, members, inside)

    if rank == 0:  # like a worker whose peer was replaced
        form("alone", 0, 1).close()
    begun = time.perf_counter()
    memory = form("both")
    figures: Figures = {"ms to form": round((time.perf_counter() - begun) * 1e3, 1)}
    for dtype in (torch.bfloat16, torch.float32):
        for count in (8, 4096, BYTES // dtype.itemsize):
            t = (torch.arange(count, device=device) % 32 + rank).to(dtype)
            memory.all_reduce(t)
            memory.wait()
            assert torch.equal(t, (2 * (torch.arange(count, device=device) % 32) + 1).to(dtype))
    for number in range(20 if is_full else 2):
        form(f"again{number}").close()
    if rank == 0:
        t = torch.ones(8, device=device)
        memory.write_signals(rank, 0)  # a GPU loads the kernels that write now
        memory.all_reduce(t)
        time.sleep(0.2)
        assert not memory.is_done(), "a sum needs both members"
        begun = time.perf_counter()
        memory.end_waits(rank)
        figures["ms to end a wait for a lost peer"] = round((time.perf_counter() - begun) * 1e3, 1)
        server.set("over", "")
        return figures
    server.get("over")
    return {}
