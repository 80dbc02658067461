"""Constraints of schemas on values: kinds, constants, bounds and counts."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from swell.cluster.text.exact_numbers import ExactFloat
from swell.cluster.text.json_grammar.number_ranges import MAX_BOUND_DIGITS, NumberRange
from swell.cluster.text.json_grammar.schema_nodes import SchemaError, listed, shown_value
from swell.cluster.text.json_types import JsonSchema, JsonValue

_KINDS = ("null", "boolean", "number", "string", "array", "object")
MAX_ITEMS = 100_000
MAX_LENGTH = 10**9
MAX_COUNTS = {
    ("minItems", "maxItems"): MAX_ITEMS,
    ("minLength", "maxLength"): MAX_LENGTH,
    ("minProperties", "maxProperties"): MAX_ITEMS,
    ("minContains", "maxContains"): MAX_ITEMS,
}


def check_values(node: JsonSchema) -> None:
    """Raises SchemaError for a keyword with an invalid value."""
    allowed_kinds([node])
    allowed_values([node])
    number_range(node)
    for low, high in MAX_COUNTS:
        bounds([node], low, high)
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaError(f"has required={shown_value(required)}, which must be a list of names")


def bounds(nodes: list[JsonSchema], low: str, high: str) -> tuple[int, int | None]:
    """Returns the tightest lower and upper bound of a count; None without an upper bound."""
    limit = MAX_COUNTS[low, high]
    least = max((_count(node, low, limit) for node in nodes if low in node), default=0)
    most = min((_count(node, high, None) for node in nodes if high in node), default=None)
    return least, most if most is None or most <= limit else None


def _count(node: JsonSchema, keyword: str, limit: int | None) -> int:
    value = node[keyword]
    if isinstance(value, float) and (number := decimal_of(value)) == int(number):
        value = int(number)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SchemaError(
            f"has {keyword}={shown_value(value)}, which must be an integer of at least 0"
        )
    if limit is not None and value > limit:
        raise SchemaError(f"has {keyword}={value}; at most {limit} is allowed")
    return value


def allowed_kinds(nodes: list[JsonSchema]) -> tuple[set[str], bool]:
    """Returns the allowed kinds of values, and whether numbers must be integers."""
    kinds, is_integer = set(_KINDS), False
    for node in nodes:
        if "type" not in node:
            continue
        names = node["type"] if isinstance(node["type"], list) else [node["type"]]
        for name in names:
            if name not in (*_KINDS, "integer"):
                raise SchemaError(f"has type {name!r}, which is not a JSON Schema type")
        is_integer = is_integer or ("integer" in names and "number" not in names)
        kinds &= {"number" if name == "integer" else name for name in names}
    return kinds, is_integer


def allowed_values(nodes: list[JsonSchema]) -> list[Any] | None:
    """Returns the values that `const` and `enum` allow in all schemas; None if no schema has
    either."""
    values: list[Any] | None = None
    for node in nodes:
        for keyword in ("const", "enum"):
            if keyword not in node:
                continue
            own = [node["const"]] if keyword == "const" else listed(node, "enum", "")
            if values is None:
                values = [*{_key(value): value for value in own}.values()]
            else:
                keys = {_key(value) for value in own}
                values = [value for value in values if _key(value) in keys]
    return values


def _key(value: Any) -> Any:
    """Returns keys that are equal for values that JSON schema considers equal: 1 and 1.0, but not 1
    and true."""
    match value:
        case bool() | None:
            return value is None, value, "literal"
        case int() | float():
            return decimal_of(value)
        case list():
            return tuple(map(_key, value))
        case dict():
            return frozenset((name, _key(one)) for name, one in value.items())
    return value


def kind_of(value: JsonValue) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def is_of_type(value: JsonValue, node: JsonSchema) -> bool:
    """Returns whether the `type` of a schema allows a value."""
    kinds, is_integer = allowed_kinds([node])
    if is_integer and isinstance(value, float):
        return NumberRange(integer=True).contains(decimal_of(value))
    return kind_of(value) in kinds


def decimal_of(value: float) -> Decimal:
    """Converts a JSON number to a decimal without rounding. Raises SchemaError for NaN and
    infinity, and for a number with too many digits."""
    if isinstance(value, float) and not math.isfinite(value):
        raise SchemaError(f"has the number {value}, which JSON does not have")
    try:
        number = Decimal(repr(value))
    except InvalidOperation:  # an exponent beyond all decimals
        number = None
    if isinstance(value, ExactFloat) and (number is None or _num_digits(number) > MAX_BOUND_DIGITS):
        raise SchemaError(
            f"has the number {shown_value(value)}, which has too many digits if it is written "
            f"without an exponent: at most {MAX_BOUND_DIGITS} are allowed"
        )
    assert number is not None, "floats and integers are decimals"
    return number


def _num_digits(number: Decimal) -> int:
    """Returns how many digits a number has without an exponent."""
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int), "the number is finite"
    return max(len(digits) + exponent, 1) + max(-exponent, 0)


def number_range(node: JsonSchema) -> NumberRange:
    numbers = NumberRange()
    for keyword, is_low, is_open in (
        ("minimum", True, False),
        ("exclusiveMinimum", True, True),
        ("maximum", False, False),
        ("exclusiveMaximum", False, True),
    ):
        value = node.get(keyword)
        if isinstance(value, bool) and is_open:  # the form of draft 4
            value = node.get("minimum" if is_low else "maximum") if value else None
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SchemaError(f"has {keyword}={shown_value(value)}, which must be a number")
        bound = decimal_of(value)
        low = NumberRange(bound, is_open) if is_low else NumberRange(None, False, bound, is_open)
        numbers = numbers.intersect(low)
    if "multipleOf" in node:
        step = node["multipleOf"]
        if isinstance(step, bool) or not isinstance(step, int | float) or decimal_of(step) <= 0:
            raise SchemaError(f"has multipleOf={shown_value(step)}, which must be more than 0")
        numbers = numbers.intersect(NumberRange(multiple_of=Fraction(decimal_of(step))))
    return numbers
