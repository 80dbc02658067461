r"""The members of an object in their order, as rules in Lark.

Each member after the first has a comma before it, and may be optional:

    ("," m1)? "," m2 ("," m3)? ("," other)*

Any member up to the first required one can be the first, so such a rest is needed after each of
them. Rests consist of rules for 2, 4, 8 ... members. With one rule per member that continues with
the next, rules would be nested as deeply as there are properties, and the library's stack overflows
at a few hundred.

If a bound depends on the number of members, a *state* is how many of the known properties have been
passed, and how many members were written. Each state is a rule, and continues with the states of
the next property.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swell.cluster.text.json_grammar.object_merging import ObjectShape, Others
from swell.cluster.text.json_grammar.schema_nodes import SchemaError

State = tuple[int, int]
"""(known properties passed, members written)"""
MAX_STATES = 5000
MAX_COUNTED = 64
"""Limit on the properties of an object with such a bound."""
_EMPTY = '""'


class ObjectMembers:
    def __init__(self, shape: ObjectShape, can_write: Callable[[Any], bool]) -> None:
        """`can_write` returns whether a finite value exists for a place."""
        self._required = shape.required
        self.names = [
            name
            for name, place in shape.properties.items()
            if name in shape.required or can_write(place)
        ]
        self.others: list[Others] = [one for one in shape.others if can_write(one.place)]
        self._least, self._most = shape.least, shape.most
        num_required = len(shape.required)
        is_low_held = shape.least <= num_required
        is_high_held = shape.most is None or (shape.most >= len(self.names) and not self.others)
        self._counts = not (is_low_held and is_high_held)
        self._cap = max(1, shape.least, shape.most or 0) if self._counts else 1
        self._live: set[State] = set()
        if all(can_write(shape.properties[name]) for name in shape.required):
            self._find_live()

    def _flat(self, prefix: str, items: Mapping[str, str], other: str) -> tuple[str, list[str]]:
        lines = [f"{prefix}m{at}: {items[name]}" for at, name in enumerate(self.names)]
        parts = [
            f'"," {prefix}m{at}' if name in self._required else f'("," {prefix}m{at})?'
            for at, name in enumerate(self.names)
        ]
        parts += [f'("," {other})*'] if self.others else []
        rests = _Rests(prefix, parts)
        firsts = []
        for at, name in enumerate(self.names):
            # Not by the member's rule, which would add one parser item for each.
            firsts.append(f"{items[name]} {rests.rest(at + 1)}".rstrip())
            if name in self._required:
                break
        else:
            firsts += [f'{other} ("," {other})*'] if self.others else []
            if not firsts:
                return "", []
            firsts = [f"({' | '.join(firsts)})?"]
        lines += [f"{name}: {run}" for name, run in rests.lines.items()]
        lines.append(f"{prefix}: {' | '.join(firsts)}")
        return prefix, lines

    @property
    def is_possible(self) -> bool:
        return (0, 0) in self._live

    def _next(self, state: State) -> tuple[State, State | None]:
        """Returns the state after the next property, and the state without it (None if it is
        required)."""
        index, count = state
        written = (index + 1, min(count + 1, self._cap))
        if self._counts and self._most is not None and count + 1 > self._most:
            written = (-1, 0)
        return written, None if self.names[index] in self._required else (index + 1, count)

    def _find_live(self) -> None:
        """Finds the states from which an object can be completed."""
        levels: list[list[State]] = [[(0, 0)]]
        num_states = 1
        for _ in self.names:
            states = dict.fromkeys(
                state for one in levels[-1] for state in self._next(one) if state and state[0] >= 0
            )
            num_states += len(states)
            if num_states > MAX_STATES or (self._counts and len(self.names) > MAX_COUNTED):
                raise SchemaError(
                    f"has {len(self.names)} properties with minProperties or maxProperties, which "
                    "is more than can be enforced; leave out these bounds"
                )
            levels.append([*states])
        for state in levels[-1]:
            if self._tail_bounds(state[1]) is not None:
                self._live.add(state)
        for level in reversed(levels[:-1]):
            for state in level:
                if any(one in self._live for one in self._next(state) if one):
                    self._live.add(state)

    def _tail_bounds(self, count: int) -> tuple[int, int | None] | None:
        """Returns the minimum and maximum number of other members; None if no number of them is
        valid."""
        if not self._counts:
            return 0, (None if self.others else 0)
        fewest = max(0, self._least - count)
        most = None if self._most is None else self._most - count
        if not self.others:
            most = 0
        return None if most is not None and fewest > most else (fewest, most)

    def lines(self, prefix: str, items: Mapping[str, str], other: str) -> tuple[str, list[str]]:
        """Returns the expression of all members, and the rules that it needs. `items` maps a name
        to the expression of its member; `other` is the expression of a member with an unknown
        name."""
        if not self._counts:
            return self._flat(prefix, items, other)
        lines, waiting, seen = [], [(0, 0)], {(0, 0)}

        def text(state: State) -> str:
            if state[0] == len(self.names):
                bounds = self._tail_bounds(state[1])
                assert bounds is not None
                return comma_list(other, *bounds, begins=state[1] == 0)
            if state not in seen:
                seen.add(state)
                waiting.append(state)
            return f"{prefix}_{state[0]}_{state[1]}"

        if not self.names:
            return text((0, 0)), []
        while waiting:
            state = waiting.pop()
            written, skipped = self._next(state)
            options = []
            if written in self._live:
                comma = '"," ' if state[1] else ""
                options.append(f"{comma}{items[self.names[state[0]]]} {text(written)}".rstrip())
            if skipped in self._live:
                assert skipped is not None
                options.append(text(skipped))
            choice = " | ".join(option for option in options if option)
            choice = f"({choice})?" if "" in options and choice else choice
            lines.append(f"{prefix}_{state[0]}_{state[1]}: {choice or _EMPTY}")
        return f"{prefix}_0_0", lines


class _Rests:
    """Rules for runs of members, each with a comma before it."""

    def __init__(self, prefix: str, parts: list[str]) -> None:
        self._prefix, self._parts = prefix, parts
        self.lines: dict[str, str] = {}

    def rest(self, start: int) -> str:
        """Returns the expression of all parts from `start` on."""
        found = []
        while start < len(self._parts):
            size = start & -start or 1 << len(self._parts).bit_length()
            while start + size > len(self._parts):
                size //= 2
            found.append(self._run(start, size))
            start += size
        return " ".join(found)

    def _run(self, start: int, size: int) -> str:
        if size == 1:
            return self._parts[start]
        name = f"{self._prefix}_{start}_{size}"
        if name not in self.lines:
            half = size // 2
            self.lines[name] = ""  # reserves its place; a run is never part of itself
            self.lines[name] = f"{self._run(start, half)} {self._run(start + half, half)}"
        return name


def comma_list(item: str, fewest: int, most: int | None, *, begins: bool) -> str:
    """Returns the expression of items with commas; with `begins`, no other item precedes them.
    Empty if no item is allowed."""
    if most == 0:
        return ""
    if not begins:
        return f'("," {item}){_times(fewest, most)}'
    some = item
    if most != 1:
        some += f' ("," {item}){_times(max(0, fewest - 1), None if most is None else most - 1)}'
    return some if fewest else f"({some})?"


def _times(fewest: int, most: int | None) -> str:
    return "*" if (fewest, most) == (0, None) else f"{{{fewest},{'' if most is None else most}}}"
