"""Keeps responses for later requests: it decides what is kept, for how long, and which ingress
computes an unfinished response. Pure: time is an argument.

An ingress stores a finished response with one `Store`. A background response is stored twice: by
`Begin` before its computation, and by `Store` when it finishes. Meanwhile its ingress, the
*runner*, reports with every `Heartbeat` what it still computes; the reply lists what to stop:

                    Store
        Begin ─► RUNNING ─────► DONE
                 │ ▲ │ └── Cancel ──► CANCELLED
                 │ │ └── no Heartbeat for LEASE_S ─┬─► LOST, after MAX_LOST_RUNNERS lost runners
                 │ └── taken by a Heartbeat ◄──────┤
                 └── RunnerExit ───────────────────┘

A response whose runner is lost is assigned to the next runner whose heartbeat offers to take
responses over, with all that it needs to compute the same answer again (`Job`). A response has one
runner at a time: what an earlier runner stores is rejected, and the reply to its next heartbeat
tells it to stop. A runner gets at most one response that is on its last attempt, so that a response
that crashes its runner does not use up the last attempt of another one. All states but RUNNING are
final: what a client has read stays true, no matter what is stored or reported later.

A restarted store does not know the responses in progress. The reply to the next heartbeat lists
them as unknown, and the ingress begins them again. Time in which the store itself was down does not
count as silence of a runner (`coordinator/transport/listening_clock.py`).
"""

from __future__ import annotations

import enum

import msgspec

from swell.cluster.api.store.bounded_table import BoundedTable, TableKey, TableLimits
from swell.configs.lora import Adapter
from swell.configs.runtime.secret import HoldsSecrets
from swell.coordinator.transport.listening_clock import ListeningClock

HEARTBEAT_S = 1.0
"""The interval at which an ingress reports what it computes, and the longest time for which a
cancelled response is still computed."""
LEASE_S = 15.0
"""An ingress that is silent for this long is lost, and others take its responses over."""
IDLE_HEARTBEAT_S = LEASE_S / 4
"""The interval at which an ingress that computes nothing offers to take responses over."""
MAX_LOST_RUNNERS = 3
"""A response that has lost this many runners may be what crashes them, and is not tried again."""
_MAX_TAKEOVER_BYTES = 8 * 1024 * 1024
"""The maximum size of the responses in a reply to one heartbeat; the first response may be
larger."""


class StoredResponse(msgspec.Struct, frozen=True):
    """One response, as JSON."""

    body: bytes
    items: bytes
    """The items of the conversation: the whole input of the model without the instructions."""

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.items)


class Job(msgspec.Struct, frozen=True):
    """The data that another ingress needs, besides the response, to compute the same answer."""

    body: bytes
    """The typed request as JSON, with its seed and without its input, which is in
    `StoredResponse.items`."""
    headers: list[tuple[bytes, bytes]] = []
    """The headers of the request that the computation needs."""
    adapter: Adapter | None = None
    """The adapter with which the response began."""

    @property
    def size_bytes(self) -> int:
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


class Store(HoldsSecrets, frozen=True, tag=True):
    """Stores a finished response. The reply tells whether it is stored: it is not if another runner
    computes the response. A repeated request has the same reply."""

    id: TableKey
    kept: StoredResponse
    runner: str = ""
    """The runner that computed the response; empty: it is not a background response."""


class Begin(HoldsSecrets, frozen=True, tag=True):
    """`runner` starts to compute this response. The reply tells whether the store has room for
    it."""

    id: TableKey
    kept: StoredResponse
    runner: str
    job: Job
    lost_runners: int = 0

    @property
    def size_bytes(self) -> int:
        return self.kept.size_bytes + self.job.size_bytes

    @property
    def is_last_attempt(self) -> bool:
        """Whether only one more attempt is left. A runner computes one such response at a time,
        because another one may be what crashes the runner."""
        return self.lost_runners == MAX_LOST_RUNNERS - 1


class Heartbeat(HoldsSecrets, frozen=True, tag=True):
    """`runner` computes these responses, and would take over `takes` others. The reply is a
    `HeartbeatReply`."""

    runner: str
    ids: list[TableKey]
    takes: int = 0


class RunnerExit(msgspec.Struct, frozen=True, tag=True):
    """`runner` terminates: others may take its responses over at once. The reply is True."""

    runner: str


class Read(HoldsSecrets, frozen=True, tag=True):
    """Reads a response. The reply to this and the next two requests is a `StoredLookup`, or
    None."""

    id: TableKey


class Cancel(HoldsSecrets, frozen=True, tag=True):
    """Stops the computation of a response. No effect on a response that is not running."""

    id: TableKey


class Delete(HoldsSecrets, frozen=True, tag=True):
    """Deletes a response, and stops its computation."""

    id: TableKey


ResponseRequest = Store | Begin | Heartbeat | RunnerExit | Read | Cancel | Delete


class StoredStatus(enum.StrEnum):
    DONE = "done"
    RUNNING = "running"
    CANCELLED = "cancelled"
    LOST = "lost"


class StoredLookup(msgspec.Struct, frozen=True):
    kept: StoredResponse
    """The response; for a cancelled or lost one, its state when it began."""
    status: StoredStatus

    @property
    def size_bytes(self) -> int:
        return self.kept.size_bytes

    @property
    def in_use(self) -> bool:
        return self.status is StoredStatus.RUNNING


class HeartbeatReply(HoldsSecrets, frozen=True):
    stop: list[TableKey]
    """Responses to stop: they were cancelled, deleted or taken over."""
    unknown: list[TableKey]
    """Responses that the store does not know; the ingress begins them again."""
    taken: list[Begin] = []
    """Responses that this runner takes over."""


ResponseReply = bool | StoredLookup | HeartbeatReply | None


class _Run(msgspec.Struct):
    """A response that is computed."""

    begin: Begin
    """The request that began it; its `runner` is empty while it waits for a runner."""
    begun_s: float
    last_heartbeat_s: float
    """When a runner reported it last, in seconds of the listening clock."""

    @property
    def size_bytes(self) -> int:
        return self.begin.size_bytes

    @property
    def in_use(self) -> bool:
        return True


class _Deleted(msgspec.Struct, frozen=True):
    """Marks a response that was deleted while it ran: its runner may still report or store it."""

    size_bytes: int = 0
    in_use: bool = False


class ResponseStore:
    """Keeps at most `limit` responses with at most `limit_bytes` in total, none older than
    `limit_s`. Running responses are in use (`bounded_table.py`)."""

    def __init__(self, limit: int, limit_bytes: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._kept = BoundedTable[_Run | StoredLookup](TableLimits(limit, limit_bytes, limit_s))
        self._running: dict[str, _Run] = {}
        """The kept responses that are running, in the order in which they began."""
        self._deleted = BoundedTable[_Deleted](TableLimits(age_s=LEASE_S))
        """Deleted responses. Ages are on the listening clock, since the last report of a runner."""
        self._clock = ListeningClock(LEASE_S)
        self._now_s = self._listened_s = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        return self._kept.size_bytes

    def handle(self, request: ResponseRequest, now_s: float) -> ResponseReply:
        """Handles one request of an ingress, at a monotonic time."""
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

    def _store(self, id: TableKey, kept: StoredResponse, runner: str) -> bool:
        before = self._kept.get(id)
        if isinstance(before, StoredLookup):  # the reply to the first request may have been lost
            return before == StoredLookup(kept, StoredStatus.DONE)
        if id in self._deleted or (before is not None and before.begin.runner not in ("", runner)):
            return False
        if self._kept.make_room(id, kept.size_bytes) is not None:
            return False
        self._end(id, StoredLookup(kept, StoredStatus.DONE))
        return True

    def _begin(self, begin: Begin) -> bool:
        id = begin.id
        known = id in self._kept or id in self._deleted
        if known or self._kept.make_room(id, begin.size_bytes) is not None:
            return False
        run = self._running[id] = _Run(begin, self._now_s, self._listened_s)
        self._kept.put(id, run, self._now_s)
        return True

    def _on_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Handles a heartbeat. Its sender counts as alive, even if the heartbeat is handled
        late."""
        orders, runner = HeartbeatReply([], [], []), heartbeat.runner
        for id in heartbeat.ids:
            run = self._running.get(id)
            if run is not None and run.begin.runner in ("", runner):
                self._assign(run, runner)
            elif id in self._deleted:
                self._deleted.renew(id, self._listened_s)
                orders.stop.append(id)
            elif id in self._kept:
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
        """Assigns responses without a runner to the sender of the heartbeat."""
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

    def _lookup(self, id: TableKey) -> StoredLookup | None:
        found = self._kept.get(id)
        if isinstance(found, _Run):
            return StoredLookup(found.begin.kept, StoredStatus.RUNNING)
        if found is not None:
            self._kept.use(id)
        return found

    def _delete(self, id: TableKey) -> StoredLookup | None:
        found = self._lookup(id)
        if self._running.pop(id, None) is not None:
            self._deleted.put(id, _Deleted(), self._listened_s)
        self._kept.remove(id)
        return found

    def _end(self, id: TableKey, found: StoredLookup) -> None:
        """Makes a response final. Later reports of its runner cannot change it."""
        self._running.pop(id, None)
        self._kept.put(id, found, self._now_s)

    def _stop(self, id: TableKey, status: StoredStatus) -> None:
        self._end(id, StoredLookup(self._running[id].begin.kept, status))

    def _expire(self) -> None:
        """Unassigns the responses of silent runners, and drops responses that are too old."""
        for id, run in list(self._running.items()):
            begin = run.begin
            if begin.runner and self._listened_s - run.last_heartbeat_s > LEASE_S:
                lost_runners = begin.lost_runners + 1
                run.begin = msgspec.structs.replace(begin, runner="", lost_runners=lost_runners)
                if lost_runners >= MAX_LOST_RUNNERS:
                    self._stop(id, StoredStatus.LOST)
            elif not begin.runner and self._now_s - run.begun_s > self._limit_s:
                self._stop(id, StoredStatus.LOST)
        self._kept.expire(self._now_s)
        self._deleted.expire(self._listened_s)
