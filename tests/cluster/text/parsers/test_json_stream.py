"""The incremental reader of calls, compared with `json`, which reads the whole text at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.text.parsers.notations.json_call import CallReader, JsonCall
from swell.cluster.text.parsers.notations.json_check import JsonChecker
from swell.cluster.text.parsers.notations.json_values import StringArguments, StringValue
from swell.cluster.text.parsers.text_reader import Reading, TextReader

pytestmark = pytest.mark.slow

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=10,
)
_SPACE = st.text(" \t\r\n", max_size=2)


def taken(value: TextReader, text: str) -> tuple[str, int]:
    """Feeds single characters to a value. Returns its output, and where it ended."""
    shown = ""
    for at, char in enumerate(text):
        if value.ended:
            return shown, at
        value.read(char)
        shown += value.take()
    value.finish()
    return shown + value.take(), len(text)


class RawValue(JsonCall):
    """A value inside the arguments of a call, or next to them."""

    fence = "<"

    def _read(self) -> Reading[None]:
        yield from self._read_raw(self._pieces.append)


@settings(max_examples=300, deadline=None)
@given(st.lists(_JSON, max_size=3) | st.dictionaries(st.text(max_size=4), _JSON), st.booleans())
def test_a_raw_value_ends_at_its_json_end(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert taken(RawValue(), text + '}]"{') == (text, len(text))


@settings(max_examples=300, deadline=None)
@given(st.text(), st.booleans())
def test_a_string_is_decoded_as_json_does(value: str, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert taken(StringValue(), text + '"x') == (value, len(text))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0xD700, 0xE100), max_size=6))
def test_surrogates_pair_up_or_are_replaced(units: list[int]) -> None:
    """`json` joins surrogate pairs too, but keeps lone surrogates, which UTF-8 cannot encode."""
    text = '"' + "".join(f"\\u{unit:04x}" for unit in units) + '"'
    pairs = json.loads(text)
    assert taken(StringValue(), text)[0] == "".join(
        "\ufffd" if 0xD800 <= ord(char) < 0xE000 else char for char in pairs
    )


@pytest.mark.parametrize(
    ("held", "arguments"),
    [
        # The first five are from vLLM's tests of its Hermes parser.
        ('{"param": "max_connections"}', '{"param": "max_connections"}'),
        ("hello", '"hello"'),
        ("{hello world}", '"{hello world}"'),
        ("[oops", '"[oops"'),
        ('{"a": 1} tail text', '"{\\"a\\": 1} tail text"'),
        ("[1]", '"[1]"'),
        (' {"é": "\\n"}\n', '{"é": "\\n"}'),
        ("é\n\x01", '"é\\n\\u0001"'),
        ("", "{}"),
    ],
)
def test_arguments_in_a_string_are_json_text(held: str, arguments: str) -> None:
    """If the string contains an object, its text is the arguments. Any other string stays a
    string."""
    text = json.dumps(held)
    assert taken(StringArguments(), text + "}x") == (arguments, len(text))
    whole = StringArguments()
    whole.read(text)
    assert whole.take() == arguments


def no_json(constant: str) -> None:
    """Rejects NaN and Infinity, which Python's `json` accepts."""
    raise json.JSONDecodeError("no JSON", constant, 0)


@settings(max_examples=300, deadline=None)
@given(_JSON, st.booleans(), st.integers(0, 200), st.text(max_size=3))
def test_a_text_may_become_json_while_a_continuation_is_json(
    value: Any, ascii_only: bool, cut: int, tail: str
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1 if ascii_only else None)
    whole = JsonChecker()
    for char in text:
        assert not whole.ended
        whole.read(char)
    assert whole.whole
    text = text[:cut] + tail
    checker = JsonChecker()
    checker.read(text)
    try:
        json.loads(text, parse_constant=no_json)
    except json.JSONDecodeError:
        assert not checker.whole
    else:
        assert checker.whole and not checker.ended


@pytest.mark.parametrize(
    "text",
    ["-", "01", "1.", "1.e", "1e+", "+1", ".5", "tru", "truex", "True]", '"\t"', '"\\x"', '"\\u00g',
     "[1,]", "{,", '{"a" 1', '{"a":1,}', "[True]", "[]]", "{}x", "1 2", "NaN", "nul", "é"],
)  # fmt: skip
def test_invalid_json_is_detected(text: str) -> None:
    checker = JsonChecker()
    checker.read(text)
    assert not checker.whole
    cut = text in ("-", "1.", "1e+", "tru", "nul")
    assert checker.ended != cut


def test_an_escape_that_json_does_not_know_is_text() -> None:
    assert taken(StringValue(), r'"\x\u12g\u00')[0] == r"\x\u12g\u00"


@st.composite
def objects(draw: st.DrawFn) -> tuple[str, dict[str, Any], str]:
    """Draws an object with its keys in any order. Returns its text, its fields, and the text of its
    arguments."""
    fields = draw(st.dictionaries(st.text(max_size=4), _JSON, max_size=3))
    fields |= {"name": draw(st.text(min_size=1, max_size=5)), "arguments": {}}
    texts = {key: json.dumps(value) for key, value in fields.items()}
    whole = draw(st.dictionaries(st.text(max_size=3), _JSON, max_size=3))
    texts["arguments"] = arguments = json.dumps(whole, indent=draw(st.sampled_from([None, 1])))
    if draw(st.booleans()):
        texts["arguments"] = json.dumps(arguments)
    space = [draw(_SPACE) for _ in range(4)]
    body = f"{space[0]},{space[1]}".join(
        f"{json.dumps(key)}{space[2]}:{space[3]}{texts[key]}"
        for key in draw(st.permutations(list(fields)))
    )
    return f"{{{space[0]}{body}{space[1]}}}", fields, arguments


@settings(max_examples=300, deadline=None)
@given(objects())
def test_name_and_arguments_equal_those_of_the_whole_object(
    one: tuple[str, dict[str, Any], str],
) -> None:
    text, fields, arguments = one
    reader, shown = CallReader(), ""
    for at, char in enumerate(text):
        assert not reader.ended, text[:at]
        assert reader.read(char) == 1
        shown += reader.take() if reader.known else ""
    assert reader.ended and reader.known
    assert (reader.name, shown) == (fields["name"], arguments)


@settings(max_examples=200, deadline=None)
@given(objects())
def test_disallowed_keys_end_a_call(
    one: tuple[str, dict[str, Any], str],
) -> None:
    text = one[0]
    reader = CallReader(other_keys=("id",))
    end = reader.read(text)
    order = list(json.loads(text))
    both = max(order.index("name"), order.index("arguments"))
    plain = all(key in ("name", "arguments", "id") for key in order[: both + 1])
    assert reader.known == plain
    assert (end == len(text)) == plain
