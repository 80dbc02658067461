"""Responses that are kept for later requests: what is kept, for how long, and who computes what is
not finished. Pure: time is an argument.

An ingress stores a finished response with one `Store`. One that is computed in the background is
stored twice: by `Begin` before its computation, and by `Store` at its end. Meanwhile its ingress,
the *runner*, says with every `Beat` what it still computes, and is answered with what to stop:

                    Store
        Begin ─► RUNNING ─────► DONE
                 │ ▲ │ └── Cancel ──► CANCELLED
                 │ │ └── no Beat for LEASE_S ─┬─► LOST, once MAX_LOST_RUNNERS were lost by it
                 │ └── taken by a Beat ◄──────┤
                 └── Leave ───────────────────┘

A response whose runner is gone is given to the next runner that beats and takes some, with all that
it needs to compute the same answer again (`Job`). It has one runner at a time: what an earlier one
stores is not kept, and its next beat hears that it is to stop. What is tried for the last time is
alone of its kind with its runner, so that it costs no other response its last attempt. All but
RUNNING are final: what a client has read stays true, whatever is stored or beaten later.

A store that was started anew knows nothing of what is computed; the next beat hears so, and the
ingress begins it again. Time in which the store itself was away is no silence of a runner
(`coordinator/listening.py`).
"""

from __future__ import annotations

import enum
from collections import OrderedDict

import msgspec

from swell.coordinator.listening import ListeningClock

BEAT_S = 1.0
"""How often an ingress tells what it computes; a cancelled response is computed that long."""
LEASE_S = 15.0
"""An ingress that is silent for this long is gone, and another one computes what it did."""
IDLE_BEAT_S = LEASE_S / 4
"""How often an ingress that computes nothing asks whether it may."""
MAX_LOST_RUNNERS = 3
"""A response whose runners are lost so often may be what ends them."""
_MAX_TAKEN_BYTES = 8 * 1024 * 1024
"""What the answer to one beat may hold, but for the first response that is taken."""


class Kept(msgspec.Struct, frozen=True):
    """One response, as JSON."""

    body: bytes
    items: bytes
    """Everything that the model was given, instructions apart: the items of the conversation."""
    background: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.items)


class Job(msgspec.Struct, frozen=True):
    """What another ingress needs, beside what is kept, to compute the same answer."""

    body: bytes
    """The typed request as JSON, with its seed and without its input: that is in `Kept.items`."""
    headers: list[tuple[bytes, bytes]] = []
    """Those of the request that go with it."""

    @property
    def size_bytes(self) -> int:
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


class Store(msgspec.Struct, frozen=True, tag=True):
    """Keep a finished response. Answered by whether it is kept: not if another runner has it."""

    id: str
    kept: Kept
    runner: str = ""
    """Who computed it; empty: not in the background."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """`runner` computes this one now. Answered by whether there is room for it."""

    id: str
    kept: Kept
    runner: str
    job: Job | None = None
    """None: no other ingress can compute it."""
    lost_runners: int = 0


class Beat(msgspec.Struct, frozen=True, tag=True):
    """`runner` computes these, and would take over `takes` others. Answered by `Orders`."""

    runner: str
    ids: list[str]
    takes: int = 0


class Leave(msgspec.Struct, frozen=True, tag=True):
    """`runner` ends: others may take what it computes, at once. Answered by True."""

    runner: str


class Read(msgspec.Struct, frozen=True, tag=True):
    """Answered, as the next two, by `Found`, or None."""

    id: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Compute it no longer. Changes nothing of what is not running."""

    id: str


class Delete(msgspec.Struct, frozen=True, tag=True):
    """Forget it, and compute it no longer."""

    id: str


StoreWish = Store | Begin | Beat | Leave | Read | Cancel | Delete


class Fate(enum.StrEnum):
    DONE = "done"
    RUNNING = "running"
    CANCELLED = "cancelled"
    LOST = "lost"


class Found(msgspec.Struct, frozen=True):
    kept: Kept
    """Of what was cancelled or lost: as it was begun."""
    fate: Fate


class Orders(msgspec.Struct, frozen=True):
    stop: list[str]
    """Nobody wants these any more."""
    unknown: list[str]
    """To be begun again."""
    taken: list[Begin] = []
    """Computed by this runner from now on."""


StoreReply = bool | Found | Orders | None


class _Entry(msgspec.Struct):
    kept: Kept
    fate: Fate
    stored_s: float
    """When it was begun, or became final."""


class _Run(_Entry):
    runner: str
    """Empty: it waits for one."""
    heard_s: float
    """When its runner spoke of it last, in seconds of listening."""
    job: Job | None
    lost_runners: int

    @property
    def is_last_attempt(self) -> bool:
        """A runner computes one of these at a time: another one may be what ends it."""
        return self.lost_runners == MAX_LOST_RUNNERS - 1

    @property
    def size_bytes(self) -> int:
        return self.kept.size_bytes + (self.job.size_bytes if self.job else 0)


class StoredResponses:
    """At most `limit` responses of `limit_bytes` together, none older than `limit_s`. Where room is
    needed, the one goes first that was not used for the longest time; none that is running."""

    def __init__(self, limit: int, limit_bytes: int, limit_s: float) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._limit_s = limit_s
        self._final: OrderedDict[str, _Entry] = OrderedDict()
        """Least recently used first."""
        self._running: dict[str, _Run] = {}
        self._unwanted: dict[str, float] = {}
        """Deleted while running, and when their runners spoke of them last, as of a run."""
        self._clock = ListeningClock(LEASE_S)
        self._listened_s = 0.0
        self._final_bytes = 0
        self._running_bytes = 0
        self._swept_s = float("-inf")

    def __len__(self) -> int:
        return len(self._final) + len(self._running)

    @property
    def size_bytes(self) -> int:
        return self._final_bytes + self._running_bytes

    def handle(self, wish: StoreWish, now_s: float) -> StoreReply:
        """One wish of an ingress, at a monotonic time."""
        self._listened_s = self._clock.listened(now_s)
        if isinstance(wish, Beat):
            return self._beat(wish, now_s)
        self._sweep(now_s)
        match wish:
            case Leave(runner):
                return self._leave(runner)
            case Store(id, kept, runner):
                return self._store(id, kept, runner, now_s)
            case Begin():
                return self._begin(wish, now_s)
            case Read(id):
                return self._find(id)
            case Cancel(id):
                if id in self._running:
                    self._stop(id, Fate.CANCELLED, now_s)
                return self._find(id)
            case Delete(id):
                return self._delete(id, now_s)

    def _store(self, id: str, kept: Kept, runner: str, now_s: float) -> bool:
        if id in self._unwanted or id in self._final:
            return False
        run = self._running.get(id)
        if run is not None and runner and run.runner not in ("", runner):
            return False
        if not self._make_room(kept.size_bytes, run):
            return False
        if run is not None:
            del self._running[id]
            self._running_bytes -= run.size_bytes
        self._add(id, _Entry(kept, Fate.DONE, now_s))
        return True

    def _begin(self, begin: Begin, now_s: float) -> bool:
        id, heard_s = begin.id, self._listened_s
        known = id in self._final or id in self._running or id in self._unwanted
        run = _Run(
            begin.kept, Fate.RUNNING, now_s, begin.runner, heard_s, begin.job, begin.lost_runners
        )
        if known or not self._make_room(run.size_bytes):
            return False
        self._running[id] = run
        self._running_bytes += run.size_bytes
        return True

    def _beat(self, beat: Beat, now_s: float) -> Orders:
        """A runner that beats is not silent, however late its beat is taken in."""
        orders, runner = Orders([], [], []), beat.runner
        for id in beat.ids:
            run = self._running.get(id)
            if run is not None and run.runner in ("", runner):
                run.runner, run.heard_s = runner, self._listened_s
            elif id in self._unwanted:
                self._unwanted[id] = self._listened_s
                orders.stop.append(id)
            elif run is not None or id in self._final:
                orders.stop.append(id)
            else:
                orders.unknown.append(id)
        self._sweep(now_s)
        self._take(beat, orders)
        return orders

    def _leave(self, runner: str) -> bool:
        for run in self._running.values():
            if run.runner == runner and run.job is not None:
                run.runner = ""
        return True

    def _take(self, beat: Beat, orders: Orders) -> None:
        """Give what waits for a runner to the one that beats."""
        runs = self._running.values()
        last = any(run.is_last_attempt for run in runs if run.runner == beat.runner)
        size_bytes = 0
        for id, run in self._running.items():
            if run.runner or run.job is None or (last and run.is_last_attempt):
                continue
            size_bytes += run.size_bytes
            full = orders.taken and size_bytes > _MAX_TAKEN_BYTES
            if full or len(orders.taken) >= beat.takes:
                return
            run.runner, run.heard_s = beat.runner, self._listened_s
            last = last or run.is_last_attempt
            orders.taken.append(Begin(id, run.kept, beat.runner, run.job, run.lost_runners))

    def _find(self, id: str) -> Found | None:
        entry = self._running.get(id) or self._final.get(id)
        if entry is None:
            return None
        if id in self._final:
            self._final.move_to_end(id)
        return Found(entry.kept, entry.fate)

    def _delete(self, id: str, now_s: float) -> Found | None:
        found = self._find(id)
        if id in self._running:
            self._stop(id, Fate.CANCELLED, now_s)
            self._unwanted[id] = self._listened_s
        if found is not None:
            self._drop(id)
        return found

    # ---------------------------------------------------------------- room

    def _make_room(self, size_bytes: int, run: _Run | None = None) -> bool:
        """Drop what must go for one more, which may take the place of `run`; nothing, where what
        runs leaves too little."""
        count = self._limit + (run is not None)
        room_bytes = self._limit_bytes - size_bytes + (run.size_bytes if run else 0)
        if len(self._running) >= count or self._running_bytes > room_bytes:
            return False
        while len(self) >= count or self.size_bytes > room_bytes:
            self._drop(next(iter(self._final)))
        return True

    def _add(self, id: str, entry: _Entry) -> None:
        self._final[id] = entry
        self._final_bytes += entry.kept.size_bytes

    def _drop(self, id: str) -> None:
        self._final_bytes -= self._final.pop(id).kept.size_bytes

    def _stop(self, id: str, fate: Fate, now_s: float) -> None:
        """It runs no longer, whatever its runner says."""
        run = self._running.pop(id)
        self._running_bytes -= run.size_bytes
        self._add(id, _Entry(run.kept, fate, now_s))

    def _sweep(self, now_s: float) -> None:
        """What runners have left, and what is too old: for which all are looked at, so not too
        often."""
        for id, run in list(self._running.items()):
            if run.runner and self._listened_s - run.heard_s > LEASE_S:
                run.runner, run.lost_runners = "", run.lost_runners + 1
                if run.job is None or run.lost_runners >= MAX_LOST_RUNNERS:
                    self._stop(id, Fate.LOST, now_s)
            elif not run.runner and now_s - run.stored_s > self._limit_s:
                self._stop(id, Fate.LOST, now_s)
        if now_s - self._swept_s < BEAT_S:
            return
        self._swept_s = now_s
        for id, entry in list(self._final.items()):
            if now_s - entry.stored_s > self._limit_s:
                self._drop(id)
        for id, heard_s in list(self._unwanted.items()):
            if self._listened_s - heard_s > LEASE_S:
                del self._unwanted[id]
