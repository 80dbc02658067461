"""The table of entries that are kept for later requests: stored responses, sessions, copies of
sessions, and resumable answers. Pure: time is an argument.

    put ─► in use ─► idle ─► dropped
              ▲        │
              └────────┘

An entry is in use while a process computes it or a client reads it. An entry in use is never
dropped. An idle entry is dropped when it was not renewed for `age_s`, or to make room; the least
recently used one goes first. If the entries in use leave too little room, nothing is dropped, and
the addition is refused. `docs/design/kept-state.md` has the reasons.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

from swell.configs.runtime.secret import SecretText

TableKey = SecretText
"""The owner of an entry, which is a digest of the client's API key, then its id."""


def table_key(owner: SecretText, id: str) -> TableKey:
    """Returns the key of the entry that `owner` (`Access.check_user`) calls `id`. A client with
    another API key cannot find it. Without API keys the owner is empty, and all clients share one
    namespace."""
    return f"{owner}/{id}"


def owner_of(key: TableKey) -> SecretText:
    return key.partition("/")[0]


def id_of(key: TableKey) -> str:
    return key.partition("/")[2]


class TableLimits(msgspec.Struct, frozen=True):
    """The bounds of a table; infinity: not bounded."""

    entries: float = math.inf
    size_bytes: float = math.inf
    age_s: float = math.inf
    """The time since the last `put` or `renew` after which an idle entry is dropped."""
    entries_per_owner: float = math.inf
    """Maximum number of entries of one owner. Not checked for the empty owner."""


class Bound(enum.Enum):
    """A bound that refuses an entry."""

    OWNER = enum.auto()
    ENTRIES = enum.auto()
    BYTES = enum.auto()


class Entry(Protocol):
    @property
    def size_bytes(self) -> int: ...

    @property
    def in_use(self) -> bool: ...


E = TypeVar("E", bound=Entry)


class _Row(Generic[E]):
    def __init__(self, key: TableKey, entry: E, renewed_s: float) -> None:
        self.entry = entry
        self.owner = owner_of(key)
        self.size_bytes = entry.size_bytes
        """The size that the table counts; a growing entry may be larger until `resize`."""
        self.renewed_s = renewed_s

    def renew(self, now_s: float) -> None:
        self.renewed_s = now_s

    def resize(self) -> None:
        self.size_bytes = self.entry.size_bytes


class _Totals:
    def __init__(self, rows: Iterable[_Row[E]] = ()) -> None:
        self.entries = self.size_bytes = 0
        self.per_owner: Counter[SecretText] = Counter()
        for row in rows:
            self.add(row, 1)

    def add(self, row: _Row[E], sign: int) -> None:
        self.entries += sign
        self.size_bytes += sign * row.size_bytes
        self.per_owner[row.owner] += sign
        if not self.per_owner[row.owner]:
            del self.per_owner[row.owner]


class BoundedTable(Generic[E]):
    """Entries by key. `put` does not check the bounds: call `make_room` before it, or `trim`
    afterwards."""

    def __init__(self, limits: TableLimits) -> None:
        self.limits = limits
        self._rows: OrderedDict[TableKey, _Row[E]] = OrderedDict()
        """The least recently used first."""
        self._by_age: OrderedDict[TableKey, None] = OrderedDict()
        """The keys, the least recently renewed first."""
        self._totals = _Totals()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: TableKey) -> bool:
        return key in self._rows

    @property
    def size_bytes(self) -> int:
        return self._totals.size_bytes

    def owned(self, owner: SecretText) -> int:
        """Returns the number of entries of `owner`."""
        return self._totals.per_owner[owner]

    def items(self) -> Iterator[tuple[TableKey, E]]:
        """Yields the keys and entries, the least recently used first."""
        return ((key, row.entry) for key, row in self._rows.items())

    def get(self, key: TableKey) -> E | None:
        row = self._rows.get(key)
        return None if row is None else row.entry

    def put(self, key: TableKey, entry: E, now_s: float) -> None:
        """Adds an entry, or replaces the one with its key, as used and renewed now."""
        self.remove(key)
        row = self._rows[key] = _Row(key, entry, now_s)
        self._by_age[key] = None
        self._totals.add(row, 1)

    def use(self, key: TableKey) -> None:
        """Makes an entry the most recently used one."""
        self._rows.move_to_end(key)

    def renew(self, key: TableKey, now_s: float) -> None:
        """Uses an entry, and restarts its age."""
        self.use(key)
        self._rows[key].renew(now_s)
        self._by_age.move_to_end(key)

    def resize(self, key: TableKey) -> None:
        """Counts the size that an entry has now."""
        row = self._rows[key]
        self._totals.add(row, -1)
        row.resize()
        self._totals.add(row, 1)

    def remove(self, key: TableKey) -> None:
        """Removes an entry, if it exists."""
        row = self._rows.pop(key, None)
        if row is not None:
            del self._by_age[key]
            self._totals.add(row, -1)

    # ---------------------------------------------------------------- bounds

    def make_room(self, key: TableKey, size_bytes: int) -> Bound | None:
        """Drops idle entries until an entry of this key and size fits, perhaps in place of the one
        that has the key. If its owner is at its bound, entries of this owner are dropped. If the
        entries in use leave too little room, drops nothing and returns the bound that is
        reached."""
        owner, old = owner_of(key), self._rows.get(key)
        more = (1, size_bytes) if old is None else (0, size_bytes - old.size_bytes)
        if self._reached(self._totals, *more, owner) is None:
            return None
        stay = _Totals(row for row in self._rows.values() if row is old or row.entry.in_use)
        refused = self._reached(stay, *more, owner)
        while refused is None and (bound := self._reached(self._totals, *more, owner)):
            self.remove(
                next(
                    key
                    for key, row in self._idle()
                    if row is not old and (bound is not Bound.OWNER or row.owner == owner)
                )
            )
        return refused

    def trim(self) -> bool:
        """Drops idle entries until the bounds of the whole table hold. Returns False if the entries
        in use exceed them."""
        while self._reached(self._totals, 0, 0, ""):
            key, _row = next(self._idle(), (None, None))
            if key is None:
                return False
            self.remove(key)
        return True

    def expire(self, now_s: float) -> None:
        """Drops the idle entries that are too old."""
        old = []
        for key in self._by_age:
            row = self._rows[key]
            if now_s - row.renewed_s <= self.limits.age_s:
                break
            if not row.entry.in_use:
                old.append(key)
        for key in old:
            self.remove(key)

    def _idle(self) -> Iterator[tuple[TableKey, _Row[E]]]:
        return ((key, row) for key, row in self._rows.items() if not row.entry.in_use)

    def _reached(
        self, totals: _Totals, entries: int, size_bytes: int, owner: SecretText
    ) -> Bound | None:
        """Returns the first bound that `totals` and the additional entries exceed."""
        limits = self.limits
        if owner and totals.per_owner[owner] + entries > limits.entries_per_owner:
            return Bound.OWNER
        if totals.entries + entries > limits.entries:
            return Bound.ENTRIES
        if totals.size_bytes + size_bytes > limits.size_bytes:
            return Bound.BYTES
        return None
