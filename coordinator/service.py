"""The coordinator's loop: hears engines and ingresses, tells ingresses what they route by.

Runs on a thread of the coordinator actor; without Ray, on any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from swell.configs.schema import ClusterConfig
from swell.coordinator.board import Board
from swell.coordinator.channel import ChannelAddress, ChannelKeys, Inbox, make_keys
from swell.coordinator.roster import Roster
from swell.coordinator.wire import ClusterView, CoordinatorMessage, EngineReport, Watch

_IDLE_POLL_S = 0.05
"""How late a roster change from another thread may be published."""


class CoordinatorService:
    """A `Board` behind an `Inbox`."""

    def __init__(self, config: ClusterConfig, host: str = "127.0.0.1") -> None:
        self.keys: ChannelKeys = make_keys()
        self._inbox: Inbox[CoordinatorMessage] = Inbox(CoordinatorMessage, self.keys, host)
        self._board = Board(config, time.monotonic())
        self._lock = threading.Lock()
        self._watchers: set[bytes] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swell-coordinator", daemon=True)
        self._thread.start()

    @property
    def address(self) -> ChannelAddress:
        return self._inbox.address

    def change(self, step: Callable[[Roster], Roster]) -> Roster:
        """Apply a function of `roster.py`; watchers hear of it at once."""
        with self._lock:
            return self._board.change(step, time.monotonic())

    def view(self) -> ClusterView:
        with self._lock:
            return self._board.view()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._inbox.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                wait_s = self._board.wait_s(time.monotonic())
            for peer, message in self._inbox.receive(min(wait_s, _IDLE_POLL_S)):
                self._take(peer, message)
            with self._lock:
                view = self._board.due(time.monotonic())
            if view is not None:
                for peer in self._watchers:
                    self._inbox.send(peer, view)

    def _take(self, peer: bytes, message: CoordinatorMessage) -> None:
        match message:
            case Watch():
                self._watchers.add(peer)
                self._inbox.send(peer, self.view())
            case EngineReport():
                with self._lock:
                    self._board.report(message, time.monotonic())
