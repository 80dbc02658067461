r"""Writes a JSON schema as a nested grammar in Lark's notation.

    %lark {
    start: r0
    r0: "{" s0_0 "}"
    s0_0: "\"age\"" ":" r1
    r1: N0
    N0: /-?(0|[1-9][0-9]{0,39})/
    %ignore /\x20|\n\x20{0,32}/
    }

Each place of the schema is a rule. A place for which no finite value exists, such as an array whose
items must be such arrays, is left out: otherwise a model could enter its rule and could never
complete it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from swell.cluster.text.json_grammar.disjoint_schemas import check_one_ofs
from swell.cluster.text.json_grammar.number_ranges import (
    NumberRange,
    UnsupportedNumber,
    number_terminal,
)
from swell.cluster.text.json_grammar.object_members import ObjectMembers, comma_list
from swell.cluster.text.json_grammar.object_merging import ObjectShape, literal
from swell.cluster.text.json_grammar.schema_merging import (
    ArrayShape,
    LiteralShape,
    NumberShape,
    Place,
    PlaceShape,
    SchemaMerger,
    Shape,
    StringShape,
)
from swell.cluster.text.json_grammar.schema_nodes import SchemaError, at
from swell.cluster.text.json_grammar.string_terminals import (
    WHITESPACE,
    library_rule,
    multiple_rule,
)
from swell.cluster.text.json_types import JsonSchema

MAX_RULES = 20_000


_BEGIN, _END = "%lark {", "}"


def json_grammar(schema: JsonSchema, is_empty: Callable[[str], bool]) -> str:
    """Returns `%lark {...}`, the cleaned schema as a part of a rule. Raises SchemaError."""
    return _Writer(SchemaMerger(schema, is_empty)).write(schema)


class _Writer:
    def __init__(self, merger: SchemaMerger) -> None:
        self._merger = merger
        self._indexes: dict[Any, int] = {}
        """Maps a place to the number of its rule."""
        self._places: list[Place] = []
        self._shapes: list[list[Shape]] = []
        self._writable: set[int] = set()
        self._lines: list[str] = []
        self._names: dict[str, str] = {}
        """Maps an expression to the name of its rule or terminal."""

    def write(self, schema: JsonSchema) -> str:
        root = self._index(self._merger.place(schema))
        while len(self._shapes) < len(self._places):
            shapes = self._merger.shapes(self._places[len(self._shapes)])
            self._shapes.append(shapes)
            for shape in shapes:
                for place in _parts(shape):
                    self._index(place)
        check_one_ofs(self._merger)
        self._find_writable()
        if root not in self._writable:
            why = f": {self._merger.reasons[0]}" if self._merger.reasons else ""
            raise SchemaError(f"is a schema that no answer can match{why}")
        for index in self._reachable(root):
            self._lines.append(f"r{index}: {' | '.join(self._alternatives(index))}")
        head = ['%llguidance {"ignore_once": true}', f"start: r{root}"]
        return "\n".join([_BEGIN, *head, *self._lines, f"%ignore /{WHITESPACE}/", _END])

    def _index(self, place: Place) -> int:
        key = None if place is None else tuple(map(id, place))
        if key not in self._indexes:
            if len(self._places) == MAX_RULES:
                raise SchemaError(f"needs a grammar of more than {MAX_RULES} rules; simplify it")
            self._indexes[key] = len(self._places)
            self._places.append(place)
        return self._indexes[key]

    def _find_writable(self) -> None:
        """Finds the places for which a finite value exists: the least set that holds those without
        parts, and those whose required parts it holds."""
        users: dict[int, set[int]] = {}
        for index, shapes in enumerate(self._shapes):
            for shape in shapes:
                for place in _parts(shape):
                    users.setdefault(self._index(place), set()).add(index)
        waiting = {*range(len(self._shapes))}
        while waiting:
            index = waiting.pop()
            if index not in self._writable and any(map(self._can_write, self._shapes[index])):
                self._writable.add(index)
                waiting |= users.get(index, set())

    def _has(self, place: Place) -> bool:
        return self._index(place) in self._writable

    def _can_write(self, shape: Shape) -> bool:
        match shape:
            case PlaceShape():
                return self._has(shape.place)
            case ArrayShape():
                needed = shape.prefix[: shape.least]
                needed += [shape.items] if shape.least > len(shape.prefix) else []
                return all(map(self._has, needed))
            case ObjectShape():
                return ObjectMembers(shape, self._has).is_possible
        return True

    def _reachable(self, root: int) -> list[int]:
        found, waiting = {root: None}, [root]
        while waiting:
            for shape in self._shapes[waiting.pop()]:
                for place in _parts(shape) if self._can_write(shape) else ():
                    index = self._index(place)
                    if index in self._writable and index not in found:
                        found[index] = None
                        waiting.append(index)
        return [*found]

    def _alternatives(self, index: int) -> list[str]:
        found: dict[str, None] = {}
        for number, shape in enumerate(self._shapes[index]):
            if self._can_write(shape):
                found[self._expression(shape, f"{index}_{number}")] = None
        return [*found]

    def _expression(self, shape: Shape, name: str) -> str:
        match shape:
            case LiteralShape():
                return " | ".join(map(literal, shape.texts))
            case NumberShape():
                return self._number(shape.numbers, shape.path)
            case StringShape():
                return self._named(shape.expression, "T" if shape.is_terminal else "t")
            case PlaceShape():
                return self._rule(shape.place)
            case ArrayShape():
                return self._array(shape)
        return self._object(shape, name)

    def _rule(self, place: Place) -> str:
        return f"r{self._index(place)}"

    def _named(self, expression: str, prefix: str) -> str:
        """Returns the name of a rule or terminal for an expression, which is written only once."""
        if expression not in self._names:
            self._names[expression] = f"{prefix}{len(self._names)}"
            self._lines.append(f"{self._names[expression]}: {expression}")
        return self._names[expression]

    def _number(self, numbers: NumberRange, path: str) -> str:
        try:
            return self._named(number_terminal(numbers), "N")
        except UnsupportedNumber as error:
            if numbers.multiple_of is None:
                place = f" at {path}" if path else ""
                raise SchemaError(f"has{place} a bound for a number that {error}") from None
        return self._named(multiple_rule(numbers, at(path, "multipleOf")), "m")

    def _array(self, shape: ArrayShape) -> str:
        prefix, most = shape.prefix, shape.most
        end = next(
            (i for i, place in enumerate(prefix) if not self._has(place)),
            len(prefix) if most is None else min(len(prefix), most),
        )
        end = end if most is None else min(end, most)
        items, tail = self._rule(shape.items), ""
        if end == len(prefix) and self._has(shape.items):
            fewest = max(0, shape.least - end)
            largest = None if most is None else most - end
            if largest != 0:
                tail = comma_list(items, fewest, largest, begins=end == 0)
        for index in range(end - 1, -1, -1):
            comma = '"," ' if index else ""
            tail = f"{comma}{self._rule(prefix[index])} {tail}".rstrip()
            tail = tail if index < shape.least else f"({tail})?"
        return f'"[" {tail} "]"' if tail else '"[" "]"'

    def _object(self, shape: ObjectShape, name: str) -> str:
        members = ObjectMembers(shape, self._has)
        items = {
            key: f'{literal(json.dumps(key, ensure_ascii=False))} ":" '
            f"{self._rule(shape.properties[key])}"
            for key in members.names
        }
        other = ""
        if members.others:
            each = [
                f"{self._named(one.name, 'K') if one.name else self._any_name()} "
                f'":" {self._rule(one.place)}'
                for one in members.others
            ]
            other = self._named(" | ".join(each), "o")
        inner, lines = members.lines(f"s{name}", items, other)
        self._lines += lines
        return f'"{{" {inner} "}}"'

    def _any_name(self) -> str:
        return self._named(library_rule({"type": "string"}), "t")


def outermost(rule: str) -> str:
    """Returns a grammar whose texts are those of a rule. A grammar from `json_grammar` is not
    nested in another one: there, whitespace could precede a string."""
    if rule.startswith(_BEGIN) and rule.endswith(_END):
        return rule.removeprefix(_BEGIN).removesuffix(_END)
    return f"start: {rule}"


def _parts(shape: Shape) -> list[Place]:
    match shape:
        case PlaceShape():
            return [shape.place]
        case ArrayShape():
            return [*shape.prefix, shape.items]
        case ObjectShape():
            return [*shape.properties.values(), *(one.place for one in shape.others)]
    return []
