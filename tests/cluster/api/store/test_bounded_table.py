"""The bounded table behaves like a reference model: a plain list that is searched for every
operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.api.store.bounded_table import Bound, BoundedTable, TableLimits

LIMITS = TableLimits(entries=4, size_bytes=100, age_s=10.0, entries_per_owner=2)
OWNERS = ["", "ann", "bob"]
KEYS = [f"{owner}/{number}" for owner in OWNERS for number in range(3)]


@dataclass(eq=False)
class Item:
    key: str
    owner: str
    size_bytes: int
    in_use: bool
    renewed_s: float = 0.0


class PlainTable:
    """The reference model: the items, least recently used first."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def reached(self, items: list[Item], new: Item) -> Bound | None:
        if new.owner and sum(item.owner == new.owner for item in items) >= 2:
            return Bound.OWNER
        if len(items) >= LIMITS.entries:
            return Bound.ENTRIES
        full = sum(item.size_bytes for item in items) + new.size_bytes > LIMITS.size_bytes
        return Bound.BYTES if full else None

    def make_room(self, new: Item) -> Bound | None:
        refused = self.reached([item for item in self.items if item.in_use], new)
        while refused is None and (bound := self.reached(self.items, new)) is not None:
            same = [item for item in self.items if item.owner == new.owner]
            among = same if bound is Bound.OWNER else self.items
            self.items.remove(next(item for item in among if not item.in_use))
        return refused

    def move_to_end(self, item: Item) -> None:
        self.items.remove(item)
        self.items.append(item)


operations = st.tuples(
    st.sampled_from(["put", "put", "put", "use", "renew", "turn", "grow", "remove", "wait"]),
    st.sampled_from(KEYS),
    st.integers(0, 60),
)


@given(st.lists(operations, min_size=10, max_size=60))
@settings(max_examples=150, deadline=None)
def test_the_table_behaves_like_a_plain_list(history: list[tuple[str, str, int]]) -> None:
    table, plain, now_s = BoundedTable[Item](LIMITS), PlainTable(), 0.0
    for what, key, number in history:
        item = table.get(key)
        if what == "wait":
            now_s += number / 6
            table.expire(now_s)
            plain.items = [
                one for one in plain.items if one.in_use or now_s - one.renewed_s <= LIMITS.age_s
            ]
        elif what == "put" and item is None:
            new = Item(key, key.partition("/")[0], number, number % 3 == 0, now_s)
            before = list(table.items())
            refused = table.make_room(key, number)
            assert refused is plain.make_room(new)
            if refused is None:
                table.put(key, new, now_s)
                plain.items.append(new)
            else:
                assert list(table.items()) == before, "a refusal drops nothing"
        elif item is not None:
            change(table, plain, what, item, number, now_s)
        assert list(table.items()) == [(one.key, one) for one in plain.items]
        assert len(table) == len(plain.items) and (key in table) == (table.get(key) is not None)
        assert table.size_bytes == sum(one.size_bytes for one in plain.items)
        for owner in OWNERS:
            assert table.owned(owner) == sum(one.owner == owner for one in plain.items)


def change(
    table: BoundedTable[Item], plain: PlainTable, what: str, item: Item, number: int, now_s: float
) -> None:
    def turn() -> None:
        item.in_use = not item.in_use

    def use() -> None:
        table.use(item.key)
        plain.move_to_end(item)

    def renew() -> None:
        table.renew(item.key, now_s)
        item.renewed_s = now_s
        plain.move_to_end(item)

    def grow() -> None:
        item.size_bytes += number
        table.resize(item.key)
        busy_bytes = sum(one.size_bytes for one in plain.items if one.in_use)
        assert table.trim() == (busy_bytes <= LIMITS.size_bytes)
        while sum(one.size_bytes for one in plain.items) > LIMITS.size_bytes:
            idle = [one for one in plain.items if not one.in_use]
            if not idle:
                break
            plain.items.remove(idle[0])

    def remove() -> None:
        table.remove(item.key)
        plain.items.remove(item)

    does: dict[str, Callable[[], None]] = {
        "turn": turn,
        "use": use,
        "renew": renew,
        "grow": grow,
        "remove": remove,
    }
    if what in does:
        does[what]()
