"""The second channel between an engine and its workers, which steps never block."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from swell.configs.runtime.process import exit_on_error
from swell.configs.runtime.waker import Waker
from swell.coordinator.transport.channel import ChannelAddress, ChannelKeys, Inbox
from swell.engine.executor.worker_monitor import WorkerMonitor
from swell.worker.wire import AbortGroups, WorkerHeartbeat, WorkerMessage

_CHECKS_PER_TIMEOUT = 8
"""More than two; otherwise the monitor would assume that it was suspended."""


class HeartbeatListener:
    """Receives the heartbeats of the workers and sends them `AbortGroups`.

    A separate thread owns the socket and checks at a fixed interval, so that its results do not
    depend on what the engine is doing. Every method may be called from any thread.
    """

    def __init__(
        self, keys: ChannelKeys, host: str, stall_timeout_s: float, ports: range | None = None
    ) -> None:
        self._inbox: Inbox[WorkerMessage] = Inbox(WorkerMessage, keys, host, ports=ports)
        self.address: ChannelAddress = self._inbox.address
        self._monitor = WorkerMonitor(stall_timeout_s)
        self._check_interval_s = stall_timeout_s / _CHECKS_PER_TIMEOUT
        self._lock = threading.Lock()
        self._peers: dict[int, bytes] = {}
        self._removed_peers: set[bytes] = set()
        """Peers of replaced workers: their late heartbeats are ignored."""
        self._abort_to: set[bytes] = set()
        self._generation = 0
        self._stopped: dict[int, str] = {}
        self._waker = Waker()
        self._closing = False
        run = exit_on_error(self._run, "worker heartbeats")
        self._thread = threading.Thread(target=run, name="swell-heartbeats", daemon=True)
        self._thread.start()

    @property
    def ranks(self) -> set[int]:
        """Workers that have sent heartbeats and were not replaced."""
        with self._lock:
            return self._monitor.ranks

    @property
    def progress_counter(self) -> int:
        """Number of layers computed by all workers so far."""
        return self._monitor.progress_counter

    def stopped(self) -> dict[int, str]:
        """Returns workers that have stopped, and why they count as stopped."""
        with self._lock:
            return dict(self._stopped)

    def describe(self) -> str:
        """Returns which workers have stopped, why, and how far all have come, for people."""
        with self._lock:
            stopped = [f"worker {rank} {why}" for rank, why in sorted(self._stopped.items())]
            return "\n".join([*stopped, self._monitor.describe()])

    @contextmanager
    def awaiting_step(self) -> Iterator[None]:
        """Marks that a result is awaited inside the context."""
        with self._lock:
            self._monitor.awaiting_step(time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                self._monitor.step_done()

    def forming(self, generation: int) -> None:
        """Records that all workers were commanded to form these groups."""
        with self._lock:
            self._monitor.forming(generation, time.monotonic())

    def groups_formed(self) -> None:
        """Records that all workers have formed their groups."""
        with self._lock:
            self._monitor.groups_formed()

    def forget(self, rank: int) -> None:
        """Forgets a worker that is about to be replaced by one with the same rank."""
        with self._lock:
            self._monitor.forget(rank)
            self._stopped.pop(rank, None)
            if rank in self._peers:
                self._removed_peers.add(self._peers.pop(rank))

    def abort(self, generation: int) -> None:
        """Lets all workers leave their groups of this generation or an older one."""
        with self._lock:
            self._generation = max(self._generation, generation)
            self._abort_to.update(self._peers.values())
            if not self._closing:
                self._waker.wake()

    def close(self) -> None:
        """Stops the thread. May be called twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._waker.wake()
        self._thread.join()
        self._inbox.close()
        self._waker.close()

    def _run(self) -> None:
        while not self._closing:
            messages = list(self._inbox.receive(self._check_interval_s, self._waker))
            now = time.monotonic()
            with self._lock:
                for peer, message in messages:
                    if isinstance(message, WorkerHeartbeat) and peer not in self._removed_peers:
                        self._peers[message.rank] = peer
                        self._monitor.on_heartbeat(
                            message.rank, message.progress_counter, now, message.generation
                        )
                self._stopped = self._monitor.check(now)
                addressees, self._abort_to = self._abort_to, set()
                command = AbortGroups(self._generation)
            for peer in addressees:
                self._inbox.send(peer, command)
