"""Numbers under a schema: a grammar accepts exactly what `jsonschema` accepts, digit by digit."""

from __future__ import annotations

import json
import random
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.grammar.structured_output import compile_grammar
from swell.cluster.text.json_grammar.number_ranges import (
    MAX_EXPONENT_DIGITS,
    MAX_FRACTION_DIGITS,
    MAX_INT_DIGITS,
    number_text,
)
from swell.cluster.text.json_grammar.schema_values import kind_of
from swell.cluster.text.schema.decode import decode

BYTES = LLTokenizer("byte")
END = BYTES.eos_token
Schema = dict[str, Any]
"""A schema whose numbers are integers, floats, or decimals that no float holds."""

_write = msgspec.json.Encoder(decimal_format="number").encode


def grammar(schema: Schema, *, as_text: bool = False) -> str:
    """Returns the grammar of a schema in a request's body, or of its text in one."""
    form = {"json": _write(schema).decode() if as_text else schema}
    turn = {"role": "user", "content": "a"}
    body = decode(_write({"messages": [turn], "structured_outputs": form}), ChatCompletionRequest)
    assert body.structured_outputs is not None
    return compile_grammar(body.structured_outputs).lark


def exact(value: Any) -> Decimal:
    return value if isinstance(value, Decimal) else Decimal(repr(value))


def accepts(lark: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def ends_before_a_marker(lark: str, text: str) -> bool:
    """Returns whether a special token may follow a text of the grammar, as `</arg_value>`
    follows a number in a call of GLM."""
    nested = f"start: form <[{END}]>\nform: %lark {{\n{lark}\n}}"
    matcher = LLMatcher(BYTES, nested, log_level=0)
    tokens = list(text.encode())
    assert matcher.try_consume_tokens(tokens) == len(tokens), (text, matcher.get_error())
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return not matcher.is_error() and bool(np.unpackbits(mask, bitorder="little")[END])


def walk(lark: str, seed: int) -> str:
    """Draws a text of the grammar, byte by byte among the allowed ones."""
    matcher = LLMatcher(BYTES, lark, log_level=0)
    rng, text = random.Random(seed), bytearray()
    while True:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed, (text, matcher.get_error())
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.3):
            return text.decode()
        token = rng.choice([one for one in allowed if one != END])
        assert matcher.consume_token(token), matcher.get_error()
        text.append(token)


def fits(schema: Schema, text: str) -> bool:
    """Returns whether the value satisfies the schema. The check is exact because floats are parsed
    as decimals."""
    value = json.loads(text, parse_float=Decimal)
    parsed = json.loads(_write(schema), parse_float=Decimal)
    checker = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "number": lambda _, one: isinstance(one, int | Decimal) and not isinstance(one, bool),
            "integer": lambda _, one: (
                isinstance(one, int | Decimal) and not isinstance(one, bool) and one == int(one)
            ),
        }
    )
    validator = jsonschema.validators.extend(
        jsonschema.Draft202012Validator, {"multipleOf": _multiple_of}, type_checker=checker
    )
    return bool(validator(parsed).is_valid(value))


def _multiple_of(_validator: Any, step: Any, instance: Any, _schema: Schema) -> Any:

    if (
        isinstance(instance, int | Decimal)
        and (Fraction(instance) / Fraction(step)).denominator > 1
    ):
        yield jsonschema.ValidationError(f"{instance} is no multiple of {step}")


# --------------------------------------------------------------------------------- the generator

_SMALL = st.builds(lambda n, e: n / 10**e, st.integers(-2000, 2000), st.integers(0, 3))
_DIGITS = st.text("0123456789", min_size=17, max_size=30)


def _placed(digits: str, point: int, sign: str) -> Decimal:
    """Returns the number with these digits, with a point among them or before them."""
    return Decimal(f"{sign}{digits[:point]}.{digits[point:]}")


_EXACT = Context(prec=500)
_LONG = st.one_of(
    st.builds(_placed, _DIGITS, st.integers(0, 30), st.sampled_from(["", "-"])),
    st.builds(
        lambda bound, offset: bound + Decimal(offset).scaleb(-19),
        st.sampled_from([Decimal(0), Decimal(1), Decimal(-1), Decimal("0.1"), Decimal("-9.6")]),
        st.integers(-3, 3),
    ),
    st.sampled_from([Decimal("1e-400"), Decimal("-2.5e-324"), Decimal("9007199254740993.0")]),
)
"""Numbers with a point whose digits a double cannot hold: with many digits, next to short ones, or
very small ones."""
_LONG_DIVISORS = ("0.1000000000000000000000001", "9007199254740993.0", "2.5000000000000000001")
_BOUNDS = st.one_of(
    _SMALL,
    _LONG,
    st.integers(-20, 20),
    st.sampled_from([0, -0.0, 1, -1, 9, 10, 99, 100, 0.5, 1.05, 9.6, -1.5, 1e-7, 1e21]),
    st.integers(-(2**64), 2**64),
    st.integers(-(10**45), 10**45),
    st.integers(2**53 - 2, 2**53 + 3),
    st.floats(-1e6, 1e6, allow_nan=False),
    st.sampled_from([1e139, -1e140, 1e141, -1e141, 2e141, 1e200, 3e200, -1e200, 1e201]),
)
_DIVISORS = [1, 2, 3, 5, 0.5, 0.25, 0.01, 10, 12, 0.3, *map(Decimal, _LONG_DIVISORS)]
_LOW = st.sampled_from(["minimum", "exclusiveMinimum"])
_HIGH = st.sampled_from(["maximum", "exclusiveMaximum"])


@st.composite
def numeric_schemas(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": draw(st.sampled_from(["number", "integer"]))}
    low, high = draw(_BOUNDS), draw(_BOUNDS)
    if draw(st.booleans()):
        step = draw(st.sampled_from([0, 0.05, 0.5, 1, 1.5, 30]))
        high = _EXACT.add(low, exact(step)) if isinstance(low, Decimal) else low + step
    if draw(st.integers(0, 4)):
        schema[draw(_LOW)] = low
    if draw(st.integers(0, 4)):
        schema[draw(_HIGH)] = high
    if draw(st.integers(0, 3)) == 0:
        schema["multipleOf"] = draw(st.sampled_from(_DIVISORS))
    return schema


def near(schema: Schema) -> list[str]:
    """Returns texts of numbers at the bounds and next to them."""
    found = {"0", "-0", "0.0", "-0.0", "1", "-1", "0.5", "10"}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if keyword in schema:
            bound = exact(schema[keyword])
            steps = ("0", "1", "-1", "0.5", "-0.5", "0.01", "-0.01", "1e-17", "-1e-17")
            for step in (*steps, "1e-25", "-1e-25", "1e-40", "-1e-40"):
                text = f"{_EXACT.add(bound, Decimal(step)):f}"
                found |= {text, f"{text}0" if "." in text else f"{text}.0"}
    return sorted(found)


@settings(deadline=None, max_examples=30)
@given(numeric_schemas(), st.integers(0, 2**32))
@example({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, 0)
@example({"type": "number", "exclusiveMinimum": 1, "maximum": 1.05}, 0)
@example({"type": "number", "exclusiveMinimum": 9, "maximum": 9.6}, 0)
@example({"type": "number", "exclusiveMaximum": -1, "minimum": -1.5}, 0)
@example({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, 0)
@example({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, 0)
@example({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, 0)
@example({"type": "number", "minimum": 1e200, "maximum": 1e201}, 0)
@example({"type": "integer", "minimum": 1e140, "maximum": 2e140}, 0)
@example({"type": "number", "minimum": -1e200, "maximum": -1e199}, 0)
@example({"type": "integer", "minimum": -(10**33) - 7, "maximum": -(10**33) - 5}, 0)
@example({"type": "number", "minimum": -1e140, "maximum": 1e141}, 0)
@example({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, 0)
@example({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 99.5, "multipleOf": 5}, 0)
@example({"type": "number", "maximum": Decimal("0.1234567890123456789")}, 0)
@example({"type": "number", "exclusiveMinimum": Decimal("1.00000000000000000001")}, 0)
@example({"type": "number", "exclusiveMinimum": 0, "maximum": Decimal("2e-324")}, 0)
@example({"type": "number", "exclusiveMinimum": Decimal("-1e-400")}, 0)
@example({"type": "number", "minimum": 1, "multipleOf": Decimal("1.0000000000000000001")}, 0)
def test_the_grammar_accepts_the_numbers_of_the_schema(schema: Schema, seed: int) -> None:
    lark, refusal = "", ""
    try:
        lark = grammar(schema)
    except BadRequest as error:
        refusal = error.message
    if refusal:
        limits = ("no answer can match", "multipleOf", "at most 400 are allowed")
        assert any(limit in refusal for limit in limits), refusal
        return
    assert grammar(schema, as_text=True) == lark
    for text in (walk(lark, seed), walk(lark, seed + 1)):
        assert fits(schema, text), (schema, text)
    for text in near(schema):
        taken = accepts(lark, text)
        assert not taken or fits(schema, text), (schema, text)
        assert not taken or ends_before_a_marker(lark, text), (schema, text)
        # The grammar needs to allow only one way to write a number: 1 for an integer or for the
        # only number of a range, and no -0 next to a bound.
        only = "minimum" in schema and schema["minimum"] == schema.get("maximum")
        whole = "." not in text or (schema["type"] == "number" and not only)
        digits = text.lstrip("-").partition(".")
        short = len(digits[0]) <= MAX_INT_DIGITS and len(digits[2]) <= MAX_FRACTION_DIGITS
        if whole and short and not text.startswith("-0") and "multipleOf" not in schema:
            assert taken or not fits(schema, text), (schema, text)


_LARGE = st.builds(
    lambda sign, digits, exponent: float(f"{sign}{digits / 10**6}e{exponent}"),
    st.sampled_from(["", "-"]),
    st.integers(10**6, 10**7 - 1),
    st.integers(130, 307),
)
"""Numbers around those that a number without bounds can have, and beyond."""
_VALUES = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(2**53 - 2, 2**53 + 3),
    st.floats(allow_nan=False, allow_infinity=False),
    _LARGE,
    _LONG.filter(lambda value: value != Decimal("1e-400")),
    st.sampled_from([0, 1, 1.0, True, False, None, "1", [1], {"a": 9007199254740993}]),
)


@settings(deadline=None, max_examples=40)
@given(st.lists(_VALUES, min_size=1, max_size=4), st.booleans(), st.integers(0, 2**32))
@example([9007199254740993], True, 0)
@example([1234567890123456789], False, 0)
@example([1e200, 2], False, 0)
@example([-1e141], True, 0)
@example([1.7976931348623157e308], True, 0)
@example([Decimal("1234567890123456789.0")], True, 0)
@example([Decimal("0.1234567890123456789"), [Decimal("1.00000000000000000001")]], False, 0)
def test_constants_are_written_in_all_their_digits(
    values: list[Any], is_const: bool, seed: int
) -> None:
    schema: Schema = {"const": values[0]} if is_const else {"enum": values}
    lark = grammar(schema)
    for number in range(3):
        text = walk(lark, seed + number)
        assert fits(schema, text), (schema, text)
    if isinstance(values[0], Decimal) or kind_of(values[0]) == "number":
        written = number_text(exact(values[0]))
        assert accepts(lark, written), (schema, written)
        for near in (f"{written}1", written[:-1] + ("1" if written[-1] != "1" else "2")):
            assert not accepts(lark, near) or fits(schema, near), (schema, near)


# ------------------------------------------------------------------------------ length of numbers


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"type": "integer"},
        {},
        {"type": "number", "minimum": 0},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "integer", "maximum": -1},
        {"type": "number", "multipleOf": 0.25},
        {"type": "number", "multipleOf": 0.3},
        {"type": "integer", "multipleOf": 7},
    ],
)
def test_the_length_of_a_number_is_bounded(schema: Schema) -> None:
    """Otherwise a model that repeats a digit would write it until its answer is cut off."""
    lark = grammar({"type": "array", "items": schema, "minItems": 1, "maxItems": 1})
    most = MAX_INT_DIGITS + MAX_FRACTION_DIGITS + MAX_EXPONENT_DIGITS + 10
    for beginning in ("[1", "[-1", "[0.1", "[0.3", "[1e1", "[7"):
        for digit in "013456789":
            text = beginning + digit * most
            matcher = LLMatcher(BYTES, lark, log_level=0)
            assert matcher.try_consume_tokens(list(text.encode())) < len(text), text


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32))
def test_a_number_without_bounds_fits_a_double(seed: int) -> None:
    text = walk(grammar({"type": "number"}), seed)
    assert abs(float(text)) < 1e200


def test_the_usual_notations_of_a_number_are_accepted() -> None:
    lark = grammar({"type": "number"})
    for text in ("0", "-0", "1.50", "6.02e23", "1E-9", "-1.6e+19", "12345678901234567890.125"):
        assert accepts(lark, text)
    for text in ("01", "+1", ".5", "1.", "1e", "1e999", "Infinity", "0x1", "1_000"):
        assert not accepts(lark, text)
