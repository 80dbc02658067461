"""Arguments in Python's and in Gemma's notation, compared with Python's own parser and with
JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.text.parsers.notations.notation import (
    FUNCTION_GEMMA,
    GEMMA4,
    PYTHON,
    Notation,
    NotationCall,
)
from swell.cluster.text.parsers.notations.scalar_readers import QuotedString, as_json_number

_KEY = st.from_regex(r"[a-z_]{1,5}", fullmatch=True)
_TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT
    | st.sampled_from(["'", '"', '"""', "\\", "\n", "é😀", "]", "})"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEY, inner, max_size=3),
    max_leaves=8,
)
_ARGUMENTS = st.dictionaries(_KEY, _VALUE, max_size=4)


def read(notation: Notation, pieces: list[str]) -> tuple[str, NotationCall]:
    call, found = NotationCall(notation), ""
    call.read(f"{notation.prefix}f{notation.open}")
    for piece in pieces:
        call.read(piece)
        found += call.take() if call.known else ""
    call.finish()
    return found + (call.take() if call.known else ""), call


def noted(value: Any, mark: str) -> str:
    """Writes a value as Gemma's chat templates do."""
    match value:
        case str():
            return f"{mark}{value}{mark}"
        case dict():
            return "{" + ",".join(f"{key}:{noted(one, mark)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(noted(one, mark) for one in value) + "]"
    return json.dumps(value)


@settings(max_examples=300, deadline=None)
@given(_ARGUMENTS)
def test_values_that_python_prints_are_parsed(arguments: dict[str, Any]) -> None:
    text = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"
    whole, call = read(PYTHON, [text])
    assert call.ended and json.loads(whole) == arguments
    assert read(PYTHON, list(text))[0] == whole


@pytest.mark.parametrize(("notation", "mark"), [(FUNCTION_GEMMA, "<escape>"), (GEMMA4, '<|"|>')])
@settings(max_examples=150, deadline=None)
@given(arguments=_ARGUMENTS)
def test_values_that_gemmas_template_writes_are_parsed(
    notation: Notation, mark: str, arguments: dict[str, Any]
) -> None:
    text = noted(arguments, mark)[1:]
    whole, call = read(notation, [text])
    assert call.ended and json.loads(whole) == arguments
    assert read(notation, list(text))[0] == whole


@settings(max_examples=200, deadline=None)
@given(_TEXT)
def test_a_json_string_is_a_python_string(text: str) -> None:
    for ascii_only in (True, False):
        one = QuotedString('"')
        one.read(json.dumps(text, ensure_ascii=ascii_only) + ",")
        assert one.ended and json.loads(one.take()) == text


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("a = 1 , b=[1, 2,], )", '{"a": 1, "b": [1, 2]}'),
        ("a=(1, 'x'), c={1: None, 'k': {}})", '{"a": [1, "x"], "c": {"1": null, "k": {}}}'),
        (
            "a=0x1F, b=1_000, c=.5, d=1., e=+3, f=007)",
            '{"a": 31, "b": 1000, "c": 0.5, "d": 1.0, "e": 3, "f": 7.0}',
        ),
        (
            "a=celsius, b=2024-01-01, c=Trueish, d=nan)",
            '{"a": "celsius", "b": "2024-01-01", "c": "Trueish", "d": "nan"}',
        ),
        (r"a='\x41\u00e9\U0001F600\q\'\0')", '{"a": "Aé😀\\\\q\'\\u0000"}'),
        ('a="""two\n"quoted" lines""", b="")', '{"a": "two\\n\\"quoted\\" lines", "b": ""}'),
        ("a=true, b=null)", '{"a": true, "b": null}'),
        (")", "{}"),
    ],
)
def test_python_calls_written_by_models_are_parsed(text: str, arguments: str) -> None:
    for pieces in ([text], list(text)):
        found, call = read(PYTHON, pieces)
        assert call.ended and found == arguments


@pytest.mark.parametrize("text", ["'x')", "1)", "a)", "a b=1)", "x, a=1)", "a=)", "*a)", "]"])
def test_text_other_than_a_call_is_not_parsed(text: str) -> None:
    _, call = read(PYTHON, [text])
    assert call.ended and not call.known


@pytest.mark.parametrize("word", ["9" * 5000, "9" * 5000 + "_1", "0x" + "f" * 5000, "1e999", "-0"])
def test_numbers_of_any_length_are_json_or_none(word: str) -> None:
    number = as_json_number(word)
    assert number in ("", word)
