"""Tracks how long conditions have held without a break, and which processes reach each other."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from tests.simulator.kernel.process import Process

if TYPE_CHECKING:
    from tests.simulator.control_plane import ControlPlane
    from tests.simulator.faults import FaultInjector

_AGAIN_S = 2.0
"""Two heartbeats."""
_CALL_S = 8.0
"""The time after which a step of the manager that began with a slow call through Ray is over."""
_REPEATED_S = 3.0
"""The time within which the manager has read the roster again after one of its calls has failed: it
pauses for a second if it was that call, and else waits up to two heartbeats for a newer roster."""
_LATE_S = 5.0
"""The time within which lost or slow packets have arrived."""


class Durations:
    """Durations of conditions, by key. Each condition is evaluated several times per virtual
    second."""

    def __init__(self, plane: ControlPlane) -> None:
        self._kernel = plane.kernel
        self._since: dict[Hashable, float] = {}
        self._seen: set[Hashable] = set()

    def held_s(self, key: Hashable, *, holds: bool = True) -> float:
        """Returns for how many seconds the condition has held at each look."""
        if not holds:
            return 0.0
        self._seen.add(key)
        return self._kernel.now - self._since.setdefault(key, self._kernel.now)

    def end_look(self) -> None:
        """Resets the conditions that were not reported as holding in this look."""
        self._since = {key: self._since[key] for key in self._seen}
        self._seen = set()


class Calm:
    """Tells which processes communicate without disturbances. Call `look` first in each look."""

    def __init__(self, plane: ControlPlane, faults: FaultInjector) -> None:
        self._plane, self._faults, self._kernel = plane, faults, plane.kernel
        self._cut_until: dict[frozenset[str], float] = {}
        """Pairs of hosts, and until when packets that a cut has held back may still arrive."""
        self._stopped_until: dict[Process, float] = {}
        """Processes that were stopped, and until when they may lack messages that they have
        missed."""
        self._late_until: dict[str, float] = {}
        """Hosts whose packets were slow or lost, and until when packets may still be late."""

    def look(self) -> None:
        now, net = self._kernel.now, self._plane.net
        for (source, target), since in net.cuts.items():
            self._cut_until[frozenset((source, target))] = now + (now - since) + 1.0
        for host in (*net.slow_hosts, *net.lossy_hosts):
            self._late_until[host] = now + _LATE_S
        for host, at in net.disturbed_at.items():  # perhaps for less than the time between looks
            self._late_until[host] = max(self._late_until.get(host, 0.0), at + _LATE_S)
        for process in self._plane.ray.processes.values():
            if process.stopped:
                self._stopped_until[process] = now + _AGAIN_S

    def reach(self, one: Process, other: Process) -> bool:
        """Returns whether both processes run, and messages between them arrive at once."""
        if not (one.runs and other.runs and one.alive and other.alive):
            return False
        if self._faults.are_severed(one, other):
            return False
        return not self.is_late(one, other)

    def is_late(self, one: Process, other: Process) -> bool:
        """Returns whether packets between two processes may be late: some were held back by a cut,
        or were slow or lost, also if this is over."""
        now, hosts, net = self._kernel.now, frozenset((one.host, other.host)), self._plane.net
        if len(hosts) == 1:
            return False
        if net.is_blocked(one.host, other.host) or self._cut_until.get(hosts, 0.0) > now:
            return True
        is_disturbed = not hosts.isdisjoint([*net.slow_hosts, *net.lossy_hosts])
        return is_disturbed or any(self._late_until.get(host, 0.0) > now for host in hosts)

    @property
    def packets_are_late(self) -> bool:
        """Whether packets between any two processes may be late. A connection that delivers nothing
        for a while delivers everything afterwards, even if the sender has terminated."""
        until = [*self._cut_until.values(), *self._late_until.values()]
        until += self._faults.severed_until.values()
        return max(until, default=0.0) > self._kernel.now

    def are_severed(self, one: Process, other: Process) -> bool:
        """Returns whether the connection of two actors holds their messages back: they arrive
        later, even if the sender has stopped since."""
        return self._faults.are_severed(one, other)

    def were_reset(self, one: Process, other: Process) -> bool:
        """Returns whether messages between two processes may have been lost with their connection,
        or while one of them was stopped. They come again with the next heartbeat."""
        now = self._kernel.now
        was_stopped = any(self._stopped_until.get(each, 0.0) > now for each in (one, other))
        return was_stopped or self._faults.were_reset(one, other)

    @property
    def calls_are_late(self) -> bool:
        """Whether calls through Ray may be late, so that several of them overlap."""
        return self._kernel.now < self._plane.ray.slow_until + _CALL_S

    @property
    def calls_were_lost(self) -> bool:
        """Whether the manager may lack the answer to its last look at the roster, because a call
        through Ray has failed."""
        return self._kernel.now < self._faults.call_failed_at + _REPEATED_S

    @property
    def manager_acts(self) -> bool:
        """Whether the manager leads, and reaches the coordinator and Ray."""
        plane = self._plane
        manager = plane.manager
        if not (manager.has_started and manager.process.alive and manager.manager.leads):
            return False
        if plane.coordinator is None or not plane.ray.is_reachable(manager.process.host):
            return False
        if self.calls_are_late:
            return False
        return self.reach(manager.process, plane.coordinators[-1][0])

    @property
    def coordinator_acts(self) -> bool:
        """Whether the coordinator runs, and has recovered the state of its predecessor."""
        coordinator = self._plane.coordinator
        if coordinator is None or coordinator._recovering:
            return False
        return self._plane.coordinators[-1][0].runs
