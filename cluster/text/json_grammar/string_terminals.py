"""Strings, and multiples of some numbers: places that are written with the library's own JSON
schemas."""

from __future__ import annotations

import json
from fractions import Fraction

from swell.cluster.text.json_grammar.ecma_patterns import library_pattern
from swell.cluster.text.json_grammar.number_ranges import NumberRange, shown_fraction
from swell.cluster.text.json_grammar.object_merging import literal
from swell.cluster.text.json_grammar.schema_nodes import SchemaError
from swell.cluster.text.json_grammar.string_patterns import (
    SplitPattern,
    ecma_expression,
    search_expression,
    split_lookahead,
)
from swell.cluster.text.json_types import JsonSchema

WHITESPACE = r"\x20|\n\x20{0,32}"
"""Whitespace, where JSON allows it: one space, or a line break and its indentation. So a model may
write JSON in lines, but cannot write blanks forever."""

MAX_MULTIPLE = 10**15
"""The largest multiple in an expression that the library evaluates: it computes in doubles."""

MAX_DENOMINATOR = 10**6
"""The largest denominator of a divisor there."""

LIBRARY_SCHEMA = "%json "
"""The beginning of a rule that is a schema of the library."""

_PLAIN = r'/"[^"\\\x00-\x1F\x7F]*"/'
"""A string without escapes: a pattern then matches exactly what is written."""


def library_rule(schema: JsonSchema) -> str:
    """Returns `%json {...}`, a schema that the library enforces, as a part of a rule."""
    return LIBRARY_SCHEMA + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def string_rule(limits: list[JsonSchema], texts: list[str] | None) -> tuple[str, bool]:
    """Returns an expression for strings, and whether it is that of a terminal, not of a rule."""
    splits = [split_lookahead(one["pattern"]) for one in limits if "pattern" in one]
    if any(split is not None and split.ahead for split in splits):
        return _terminal(limits, [split for split in splits if split is not None], texts), True
    schema: JsonSchema = {"type": "string"}
    if texts is not None:
        schema["enum"] = texts
    written = [_in_library(limit) for limit in limits]
    if len(limits) == 1:
        return library_rule({**schema, **written[0]}), False
    parts = [{"type": "string", **limit} for limit in written]
    return library_rule({**schema, "allOf": parts} if parts else schema), False


def _in_library(limit: JsonSchema) -> JsonSchema:
    if "pattern" not in limit:
        return limit
    try:
        return {**limit, "pattern": library_pattern(limit["pattern"])}
    except ValueError as error:
        raise SchemaError(f"has the pattern {limit['pattern']!r}, which {error}") from None


def _terminal(limits: list[JsonSchema], splits: list[SplitPattern], texts: list[str] | None) -> str:
    parts = [_PLAIN]
    if texts is not None:
        choice = " | ".join(literal(json.dumps(text, ensure_ascii=False)) for text in texts)
        parts.append(f"({choice})")
    for limit in limits:
        least, most = limit.get("minLength", 0), limit.get("maxLength", "")
        if least or most != "":
            parts.append(f'/"(?s:.{{{least},{most}}})"/')
    for split in splits:
        try:
            parts.append(f'/"{search_expression(split.rest)}"/')
        except ValueError as error:
            raise SchemaError(str(error)) from None
        for ahead in split.ahead:
            behind = "" if ahead.is_to_end else "(?s:.*)"
            inner = ecma_expression(ahead.pattern)
            parts.append(f'{"~" if ahead.negated else ""}/"({inner}){behind}"/')
    return " & ".join(parts)


def multiple_rule(numbers: NumberRange, where: str) -> str:
    """Returns a rule for multiples that no expression over digits can express, such as those of 3.
    `where` is the path of the divisor."""
    step = numbers.step
    assert step is not None and numbers.multiple_of is not None
    most_steps = int(MAX_MULTIPLE / step) if step >= 1 else MAX_MULTIPLE
    least, most = numbers.multiples
    low = max(-most_steps, -most_steps if least is None else least)
    high = min(most_steps, most_steps if most is None else most)
    named = f"has {where}={shown_fraction(numbers.multiple_of)}"
    if step.numerator > MAX_MULTIPLE or step.denominator > MAX_DENOMINATOR:
        raise SchemaError(
            f"{named}, which cannot be enforced: the last digits of a number do not show whether "
            f"it is a multiple, and the divisor is more than {MAX_MULTIPLE} or no multiple of "
            f"1/{MAX_DENOMINATOR}"
        )
    if low > high:
        raise SchemaError(
            f"{named} together with bounds, which can only be enforced up to {MAX_MULTIPLE}"
        )
    kind = "integer" if numbers.integer else "number"
    return library_rule(
        {
            "type": kind,
            "multipleOf": _number(step),
            "minimum": _number(low * step),
            "maximum": _number(high * step),
        }
    )


def _number(value: Fraction) -> float:
    return value.numerator if value.denominator == 1 else value.numerator / value.denominator
