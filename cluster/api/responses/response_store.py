"""Responses that are kept for later requests: what is kept, for how long, and who computes what is
not finished. Pure: time is an argument.

An ingress stores a finished response with one `Store`. One that is computed in the background is
stored twice: by `Begin` before its computation, and by `Store` at its end. Meanwhile its ingress,
the *runner*, reports with every `Heartbeat` what it still computes; the reply is what to stop:

                    Store
        Begin ─► RUNNING ─────► DONE
                 │ ▲ │ └── Cancel ──► CANCELLED
                 │ │ └── no Heartbeat for LEASE_S ─┬─► LOST, once MAX_LOST_RUNNERS were lost by it
                 │ └── taken by a Heartbeat ◄──────┤
                 └── RunnerExit ───────────────────┘

A response whose runner is gone is given to the next runner whose heartbeat takes some, with all
that it needs to compute the same answer again (`Job`). It has one runner at a time: what an earlier
one stores is not kept, and the reply to its next heartbeat is to stop. What is tried for the last
time is alone of its kind with its runner, so that it costs no other response its last attempt. All
but RUNNING are final: what a client has read stays true, whatever is stored or reported later.

A store that was started anew knows nothing of what is computed; the reply to the next heartbeat
lists it as unknown, and the ingress begins it again. Time in which the store itself was away is no
silence of a runner (`coordinator/listening_clock.py`).
"""

from __future__ import annotations

import enum
from collections import OrderedDict

import msgspec

from swell.configs.lora import Adapter
from swell.configs.secret import HoldsSecrets, SecretText
from swell.coordinator.listening_clock import ListeningClock

StoreKey = SecretText
"""The name of a response: its id, behind a digest of the key that its client has."""
HEARTBEAT_S = 1.0
"""How often an ingress reports what it computes; a cancelled response is computed that long."""
LEASE_S = 15.0
"""An ingress that is silent for this long is gone, and another one computes what it did."""
IDLE_HEARTBEAT_S = LEASE_S / 4
"""How often an ingress that computes nothing offers to take some over."""
MAX_LOST_RUNNERS = 3
"""A response whose runners are lost so often may be what ends them."""
_MAX_TAKEOVER_BYTES = 8 * 1024 * 1024
"""What the answer to one heartbeat may hold, but for the first response that is taken."""


class StoredResponse(msgspec.Struct, frozen=True):
    """One response, as JSON."""

    body: bytes
    items: bytes
    """Everything that the model was given, instructions apart: the items of the conversation."""

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.items)


class Job(msgspec.Struct, frozen=True):
    """What another ingress needs, beside what is kept, to compute the same answer."""

    body: bytes
    """The typed request as JSON, with its seed and without its input: that is in
    `StoredResponse.items`."""
    headers: list[tuple[bytes, bytes]] = []
    """Those of the request that go with it."""
    adapter: Adapter | None = None
    """The one with which it began."""

    @property
    def size_bytes(self) -> int:
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


class Store(HoldsSecrets, frozen=True, tag=True):
    """Store a finished response. Answered by whether it is stored: not if another runner has it."""

    id: StoreKey
    kept: StoredResponse
    runner: str = ""
    """The runner that computed it; empty: not in the background."""


class Begin(HoldsSecrets, frozen=True, tag=True):
    """`runner` computes this one now. Answered by whether there is room for it."""

    id: StoreKey
    kept: StoredResponse
    runner: str
    job: Job
    lost_runners: int = 0

    @property
    def size_bytes(self) -> int:
        return self.kept.size_bytes + self.job.size_bytes

    @property
    def is_last_attempt(self) -> bool:
        """A runner computes one of these at a time: another one may be what ends it."""
        return self.lost_runners == MAX_LOST_RUNNERS - 1


class Heartbeat(HoldsSecrets, frozen=True, tag=True):
    """`runner` computes these, and would take over `takes` others. Answered by `HeartbeatReply`."""

    runner: str
    ids: list[StoreKey]
    takes: int = 0


class RunnerExit(msgspec.Struct, frozen=True, tag=True):
    """`runner` ends: others may take what it computes, at once. Answered by True."""

    runner: str


class Read(HoldsSecrets, frozen=True, tag=True):
    """Answered, as the next two, by `StoredLookup`, or None."""

    id: StoreKey


class Cancel(HoldsSecrets, frozen=True, tag=True):
    """Stop computing it. No effect on a response that is not running."""

    id: StoreKey


class Delete(HoldsSecrets, frozen=True, tag=True):
    """Delete it, and stop computing it."""

    id: StoreKey


StoreRequest = Store | Begin | Heartbeat | RunnerExit | Read | Cancel | Delete


class StoredStatus(enum.StrEnum):
    DONE = "done"
    RUNNING = "running"
    CANCELLED = "cancelled"
    LOST = "lost"


class StoredLookup(msgspec.Struct, frozen=True):
    kept: StoredResponse
    """The response; for a cancelled or lost one, as it was begun."""
    status: StoredStatus


class HeartbeatReply(HoldsSecrets, frozen=True):
    stop: list[StoreKey]
    """Responses to stop: they were cancelled, deleted or taken over."""
    unknown: list[StoreKey]
    """Responses that the store does not know; the ingress begins them again."""
    taken: list[Begin] = []
    """Responses that this runner takes over."""


StoreReply = bool | StoredLookup | HeartbeatReply | None


class _Run(msgspec.Struct):
    begin: Begin
    """Its `runner` is empty while it waits for one."""
    begun_s: float
    last_heartbeat_s: float
    """When its runner reported it last, in seconds of listening."""


class _Final(msgspec.Struct, frozen=True):
    found: StoredLookup
    final_s: float
    """When it became final."""


class ResponseStore:
    """At most `limit` responses of `limit_bytes` together, none older than `limit_s`. Where room is
    needed, the one goes first that was not used for the longest time; none that is running."""

    def __init__(self, limit: int, limit_bytes: int, limit_s: float) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._limit_s = limit_s
        self._final: OrderedDict[str, _Final] = OrderedDict()
        """Least recently used first."""
        self._running: dict[str, _Run] = {}
        self._deleted_while_running: dict[str, float] = {}
        """Deleted while running, and when their runners reported them last, as of a run."""
        self._clock = ListeningClock(LEASE_S)
        self._now_s = self._listened_s = 0.0
        self._final_bytes = 0
        self._running_bytes = 0
        self._last_expiry_s = float("-inf")

    def __len__(self) -> int:
        return len(self._final) + len(self._running)

    @property
    def size_bytes(self) -> int:
        return self._final_bytes + self._running_bytes

    def handle(self, request: StoreRequest, now_s: float) -> StoreReply:
        """One request of an ingress, at a monotonic time."""
        self._now_s, self._listened_s = now_s, self._clock.advance(now_s)
        if isinstance(request, Heartbeat):
            return self._on_heartbeat(request)
        self._expire()
        match request:
            case RunnerExit(runner):
                return self._on_runner_exit(runner)
            case Store(id, kept, runner):
                return self._store(id, kept, runner)
            case Begin():
                return self._begin(request)
            case Read(id):
                return self._lookup(id)
            case Cancel(id):
                if id in self._running:
                    self._stop(id, StoredStatus.CANCELLED)
                return self._lookup(id)
            case Delete(id):
                return self._delete(id)

    def _store(self, id: StoreKey, kept: StoredResponse, runner: str) -> bool:
        if id in self._deleted_while_running or id in self._final:
            return False
        run = self._running.get(id)
        if run is not None and run.begin.runner not in ("", runner):
            return False
        if not self._make_room(kept.size_bytes, run):
            return False
        self._end(id, StoredLookup(kept, StoredStatus.DONE))
        return True

    def _begin(self, begin: Begin) -> bool:
        id = begin.id
        known = id in self._final or id in self._running or id in self._deleted_while_running
        if known or not self._make_room(begin.size_bytes):
            return False
        self._running[id] = _Run(begin, self._now_s, self._listened_s)
        self._running_bytes += begin.size_bytes
        return True

    def _on_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """A runner that sends one is not silent, however late its heartbeat is handled."""
        orders, runner = HeartbeatReply([], [], []), heartbeat.runner
        for id in heartbeat.ids:
            run = self._running.get(id)
            if run is not None and run.begin.runner in ("", runner):
                self._assign(run, runner)
            elif id in self._deleted_while_running:
                self._deleted_while_running[id] = self._listened_s
                orders.stop.append(id)
            elif run is not None or id in self._final:
                orders.stop.append(id)
            else:
                orders.unknown.append(id)
        self._expire()
        self._assign_orphans(heartbeat, orders)
        return orders

    def _on_runner_exit(self, runner: str) -> bool:
        for run in self._running.values():
            if run.begin.runner == runner:
                self._assign(run, "")
        return True

    def _assign_orphans(self, heartbeat: Heartbeat, orders: HeartbeatReply) -> None:
        """Give what waits for a runner to the sender."""
        begins = [run.begin for run in self._running.values()]
        last = any(begin.is_last_attempt for begin in begins if begin.runner == heartbeat.runner)
        size_bytes = 0
        for begin in begins:
            if begin.runner or (last and begin.is_last_attempt):
                continue
            size_bytes += begin.size_bytes
            full = orders.taken and size_bytes > _MAX_TAKEOVER_BYTES
            if full or len(orders.taken) >= heartbeat.takes:
                return
            last = last or begin.is_last_attempt
            orders.taken.append(self._assign(self._running[begin.id], heartbeat.runner))

    def _assign(self, run: _Run, runner: str) -> Begin:
        run.begin = msgspec.structs.replace(run.begin, runner=runner)
        run.last_heartbeat_s = self._listened_s
        return run.begin

    def _lookup(self, id: StoreKey) -> StoredLookup | None:
        if id in self._running:
            return StoredLookup(self._running[id].begin.kept, StoredStatus.RUNNING)
        if id not in self._final:
            return None
        self._final.move_to_end(id)
        return self._final[id].found

    def _delete(self, id: StoreKey) -> StoredLookup | None:
        found = self._lookup(id)
        if id in self._running:
            self._stop(id, StoredStatus.CANCELLED)
            self._deleted_while_running[id] = self._listened_s
        if found is not None:
            self._drop(id)
        return found

    # ---------------------------------------------------------------- room

    def _make_room(self, size_bytes: int, run: _Run | None = None) -> bool:
        """Drop what must go for one more, which may take the place of `run`; nothing, where what
        runs leaves too little."""
        count = self._limit + (run is not None)
        room_bytes = self._limit_bytes - size_bytes + (run.begin.size_bytes if run else 0)
        if len(self._running) >= count or self._running_bytes > room_bytes:
            return False
        while len(self) >= count or self.size_bytes > room_bytes:
            self._drop(next(iter(self._final)))
        return True

    def _drop(self, id: StoreKey) -> None:
        self._final_bytes -= self._final.pop(id).found.kept.size_bytes

    def _end(self, id: StoreKey, found: StoredLookup) -> None:
        """It is final, and runs no longer, whatever its runner reports."""
        run = self._running.pop(id, None)
        if run is not None:
            self._running_bytes -= run.begin.size_bytes
        self._final[id] = _Final(found, self._now_s)
        self._final_bytes += found.kept.size_bytes

    def _stop(self, id: StoreKey, status: StoredStatus) -> None:
        self._end(id, StoredLookup(self._running[id].begin.kept, status))

    def _expire(self) -> None:
        """What runners have left, and what is too old; for the latter all are checked, so not too
        often."""
        for id, run in list(self._running.items()):
            begin = run.begin
            if begin.runner and self._listened_s - run.last_heartbeat_s > LEASE_S:
                lost_runners = begin.lost_runners + 1
                run.begin = msgspec.structs.replace(begin, runner="", lost_runners=lost_runners)
                if lost_runners >= MAX_LOST_RUNNERS:
                    self._stop(id, StoredStatus.LOST)
            elif not begin.runner and self._now_s - run.begun_s > self._limit_s:
                self._stop(id, StoredStatus.LOST)
        if self._now_s - self._last_expiry_s < HEARTBEAT_S:
            return
        self._last_expiry_s = self._now_s
        for id, entry in list(self._final.items()):
            if self._now_s - entry.final_s > self._limit_s:
                self._drop(id)
        for id, last_heartbeat_s in list(self._deleted_while_running.items()):
            if self._listened_s - last_heartbeat_s > LEASE_S:
                del self._deleted_while_running[id]
