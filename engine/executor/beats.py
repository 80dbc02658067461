"""The second channel between an engine and its workers, which no step ever blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from swell.configs.process import vital
from swell.coordinator.channel import ChannelAddress, ChannelKeys, Inbox, Waker
from swell.engine.executor.watch import Watch
from swell.worker.wire import AbortGroups, WorkerBeat, WorkerMessage

_LOOKS_PER_LIMIT = 8
"""More than two, else the watch would think that it had slept."""


class BeatListener:
    """Hears the beats of the workers and tells workers to leave their groups.

    A thread owns the socket and looks around in a rhythm of its own, so that what it finds does
    not depend on what the engine is doing. Every method may be called from any thread.
    """

    def __init__(self, keys: ChannelKeys, host: str, stall_timeout_s: float) -> None:
        self._inbox: Inbox[WorkerMessage] = Inbox(WorkerMessage, keys, host)
        self.address: ChannelAddress = self._inbox.address
        self._watch = Watch(stall_timeout_s)
        self._look_s = stall_timeout_s / _LOOKS_PER_LIMIT
        self._lock = threading.Lock()
        self._peers: dict[int, bytes] = {}
        self._gone: set[bytes] = set()
        """Peers of workers that were given up: a late beat of theirs means nothing."""
        self._abort_to: set[bytes] = set()
        self._generation = 0
        self._stopped: dict[int, str] = {}
        self._waker = Waker()
        self._closing = False
        run = vital(self._run, "workers' beats")
        self._thread = threading.Thread(target=run, name="swell-beats", daemon=True)
        self._thread.start()

    @property
    def ranks(self) -> set[int]:
        """Workers that were heard and not given up."""
        with self._lock:
            return self._watch.ranks

    @property
    def ticks(self) -> int:
        """Layers computed by all workers so far."""
        return self._watch.ticks

    def stopped(self) -> dict[int, str]:
        """Workers that are there and do nothing any more, and why they are thought to."""
        with self._lock:
            return dict(self._stopped)

    @contextmanager
    def step_out(self) -> Iterator[None]:
        """While a result is waited for."""
        with self._lock:
            self._watch.step_out(time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                self._watch.step_done()

    def forming(self, generation: int) -> None:
        """All workers have been told to form these groups."""
        with self._lock:
            self._watch.forming(generation, time.monotonic())

    def grouped(self) -> None:
        """They have."""
        with self._lock:
            self._watch.grouped()

    def forget(self, rank: int) -> None:
        """The worker is given up: its successor has the same rank."""
        with self._lock:
            self._watch.forget(rank)
            self._stopped.pop(rank, None)
            if rank in self._peers:
                self._gone.add(self._peers.pop(rank))

    def abort(self, generation: int) -> None:
        """Let all workers leave their groups of this generation or an older one."""
        with self._lock:
            self._generation = max(self._generation, generation)
            self._abort_to.update(self._peers.values())
            if not self._closing:
                self._waker.wake()

    def close(self) -> None:
        """May be called twice."""
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
            said = list(self._inbox.receive(self._look_s, self._waker))
            now = time.monotonic()
            with self._lock:
                for peer, message in said:
                    if isinstance(message, WorkerBeat) and peer not in self._gone:
                        self._peers[message.rank] = peer
                        self._watch.beat(message.rank, message.ticks, now, message.generation)
                self._stopped = self._watch.look(now)
                addressees, self._abort_to = self._abort_to, set()
                command = AbortGroups(self._generation)
            for peer in addressees:
                self._inbox.send(peer, command)
