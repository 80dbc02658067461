"""The invariants of `Parser` for every format, on whole answers, broken answers and
near-markers."""

from __future__ import annotations

import cProfile
import itertools
from functools import cache
from types import GeneratorType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.text.parsers.deltas import Content, Reasoning, ToolCall
from tests.cluster.text.parsers.sample_outputs import (
    ALL,
    TAGS,
    Names,
    fragments,
    markers,
    parser,
    read,
    symbols,
    texts,
    whole,
)

pytestmark = pytest.mark.slow

every_format = pytest.mark.parametrize("names", ALL, ids=str)
alone = pytest.mark.parametrize(
    "names", [*(names for names in ALL if None in names), ("hermes", "think")], ids=str
)
"""Each format by itself, and one pair."""


# ---------------------------------------------------------------------------------------- cuts

MAX_CUTS = 60
"""About the most places at which one text is cut into two pieces."""


@every_format
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_parts_do_not_depend_on_how_the_text_is_cut(names: Names, data: st.DataObject) -> None:
    """Tries every cut of a short text, and equally spaced cuts of a longer one."""
    text = data.draw(texts(names))
    parts = read(names, [text])
    assert read(names, list(text)) == parts
    assert read(names, [piece for char in text for piece in ("", char, "")]) == parts
    step = 1 + len(text) // MAX_CUTS
    for cut in range(data.draw(st.integers(0, step - 1)), len(text) + 1, step):
        assert read(names, [text[:cut], text[cut:]]) == parts
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert read(names, pieces) == parts


@every_format
def test_every_split_of_a_real_answer_yields_the_same_parts(names: Names) -> None:
    """Tries all 8 ways to split a window of three characters, for each window of the answer."""
    text = "\n".join(whole(names) or ["Hm."])
    parts = read(names, [text])
    window = 3
    for start in range(0, len(text), window):
        assert read(names, [text[:start], "", text[start:]]) == parts
        for cuts in itertools.product([False, True], repeat=window):
            if not any(cuts[1:]):
                continue  # no cut, or the one above
            ends = [start + i for i, cut in enumerate(cuts) if cut and start + i < len(text)]
            pieces = [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]
            assert read(names, pieces) == parts


# ------------------------------------------------------------------------------------ held text

_ENDS = ["", 'x"', '"', 'x"]', "]", 'x"}', "}", 'x"}]', "}]", 'x"]}', "]}", 'x"}}', "}}"]
"""Texts that close a value at which the text stopped."""

_CALL_ENDS = [
    *['{}, "name": "f"}', '"f", "arguments": {}}', '1, "name": "f", "arguments": {}}'],
    *['1, "name": "f"}', '1, "arguments": {}}', "{}}", '"f"}'],
]
"""Texts that complete a call of a known tool that stopped before a value."""


@cache
def _continuations(names: Names) -> list[str]:
    """Returns continuations. At any point where a parser may hold text, one of them completes a
    call or a tag."""
    ends = [*_CALL_ENDS, *(f": {end}" for end in _CALL_ENDS), ", " * bool(names[0])]
    for key in ("name", "arguments", "parameters", "type", "id", "x"):
        calls = [f'{{"{key}": {end}' for end in _CALL_ENDS]
        ends += [one[at:] for one in calls for at in range(len(key) + 3)]
        ends += [f', "{key}": {end}' for end in _CALL_ENDS]
    ends += ["n", "e9", "9", "\\ude00", "x", "g[ARGS]{}", "[ARGS]{}", 'x"=1)', "x'=1)"]
    ends += ['\\u007b}"'[at:] for at in range(7)]  # an escaped brace
    ends += ["9" * size + "[ARGS]{}" for size in range(10)]
    found = [one[at:] for one in whole(names) for at in range(len(one))]
    found += [end + tail for end in _ENDS for tail in ends]
    for marker in markers(names):
        tails = ['{"name": "g", "arguments": {}}', "g[ARGS]{}", "{}", "9" * 9 + "[ARGS]{}"]
        found += [marker[at:] + tail for at in range(len(marker)) for tail in tails]
    return found


@alone
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_released_text_is_common_to_all_continuations(names: Names, data: st.DataObject) -> None:
    """Released text is never taken back. For all held text, some continuation gives it another
    meaning."""
    text = data.draw(texts(names, max_pieces=4))[:80]
    one, parts, found = parser(names), [], ""
    for end, char in enumerate(text, 1):
        parts += one.push(char)
        out = symbols(parts)
        ended = symbols(read(names, [text[:end]]))
        assert ended[: len(out)] == out
        if len(ended) == len(out):
            continue
        for continuation in [found[1:], *_continuations(names)]:
            future = symbols(read(names, [text[:end] + continuation]))
            assert future[: len(out)] == out, (text[:end], continuation)
            if future[len(out) : len(out) + 1] != [ended[len(out)]]:
                found = continuation
                break
        else:
            raise AssertionError(f"{ended[len(out) :]} held for nothing behind {text[:end]!r}")


# ------------------------------------------------------------------------------- nothing is lost


@every_format
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_text_without_calls_is_released_completely(names: Names, data: st.DataObject) -> None:
    """With reasoning, only its tags and the newlines around them are dropped."""
    if names[0] == "harmony":
        return  # this format marks all text and drops its headers
    text = data.draw(texts(names))
    parts = read(names, [text])
    if any(isinstance(part, ToolCall) for part in parts):
        return
    shown = "".join(part.text for part in parts if isinstance(part, Content | Reasoning))
    if names[1] is None:
        assert shown == text
        return
    for tag in TAGS[names[1]]:
        if shown.count(tag) < text.count(tag):
            text = text.replace(tag, "", 1)
    assert shown.replace("\n", "").lstrip() == text.replace("\n", "").lstrip()


@every_format
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_parts_are_pieces_of_the_text_in_its_order(names: Names, data: st.DataObject) -> None:
    """A parser may drop text, but never adds or moves any, except that it decodes escapes."""
    text = data.draw(texts(names)).replace("\\", "")
    rest = iter(text)
    ordered = True
    for part in read(names, [text]):
        if isinstance(part, ToolCall):
            ordered = False  # Arguments may come before the name.
        elif ordered:
            assert all(char in rest for char in part.text), (text, part)


# ------------------------------------------------------------------------------ linear in length


MAX_STEPS_PER_CHAR = 100
"""About twice the cost of the most expensive character, and far below the length of the answers."""


def _events(names: Names, pieces: list[str]) -> int:
    """Returns the number of Python and C function calls while an answer is parsed."""
    one = parser(names)
    with cProfile.Profile() as profile:
        for piece in pieces:
            one.push(piece)
        one.flush()
    return sum(entry.callcount for entry in profile.getstats())


def held_strings(value: object, depth: int = 5) -> list[str]:
    """Returns the strings that an object holds, except those in lists, which are joined only
    once."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, GeneratorType):
        inside = held_strings(value.gi_yieldfrom, depth)
        held = dict(value.gi_frame.f_locals) if value.gi_frame else {}
        held.pop("self", None)
    elif depth and hasattr(value, "__dict__"):
        inside, held = [], vars(value)
    else:
        return []
    return inside + [text for one in held.values() for text in held_strings(one, depth - 1)]


_ADVERSARIES = [
    "a",
    "\n",
    " ",
    "[",
    "<",
    "\\",
    '{"',
    '{"x":{',
    "<tool_call>",
    '<tool_call>{"x":[',
    '<tool_call>{"x":"',
    '<tool_call>{"name":"f","arguments":{"',
    '<tool_call>\n{"arguments":"\\',
    "<tool_call>\n\n",
    "<tool_",
    "</tool_call>",
    "</think>\n",
    "</thin",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]f[ARGS]",
    '[TOOL_CALLS][{"name":"f","arguments":{}},',
    "[TOOL_CALLS]aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "[CALL_ID]",
    '<|python_tag|>{"a":',
    "<|python_tag|>",
    '{"name":"f","parameters":{}};',
    '{"parameters":[',
    '{"name":"',
    '{"type":"',
    "<tool_call>f<arg_key>k</arg_key><arg_value>",
    "<tool_call>\n<function=f>\n<parameter=a>\n",
    "<tool_call>\n<function=g>\n<parameter=b>\n[",
    "<function=f>",
    "<parameter=a>\n",
    "\n</param",
    "</arg_value><arg_key>",
    "<|tool_calls_section_begin|><|tool_call_begin|>f:0",
    '<|tool_call_argument_begin|>{"a": ',
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>g\n```json\n{",
    '<minimax:tool_call><invoke name="f"><parameter name="a">',
    '<｜DSML｜function_calls><｜DSML｜invoke name="f">',
    '<｜DSML｜parameter name="a" string="false">{',
]


@alone
def test_parsing_time_is_linear_in_the_answer(names: Names) -> None:
    """The cost per character is bounded, in one piece and character by character, and no step
    copies held text, because it is held in lists. Each format reads every unit after one opening,
    and its own markers after all openings."""
    begun = [call[: len(call) * 2 // 3] for call in whole(names)]
    openings = ["", "[TOOL_CALLS]", '<tool_call>{"arguments":{"a":"', '{"type":"', *begun]
    marks = tuple(markers(names))
    for count, unit in enumerate(_ADVERSARIES):
        own = bool(marks) and unit.startswith(marks)
        for opening in openings if own else [openings[count % len(openings)]]:
            _check_work(names, opening, unit)


def _check_work(names: Names, opening: str, unit: str) -> None:
    text = opening + unit * (600 // len(unit))
    for pieces in (list(text), [text]):
        assert _events(names, pieces) < MAX_STEPS_PER_CHAR * len(text) + 100, (unit, opening)
    one = parser(names)
    for count, char in enumerate(text):
        one.push(char)
        if count % 50 == 0:
            assert max(map(len, held_strings(one)), default=0) <= 300, (unit, opening)


def test_fragments_reach_calls_of_every_format() -> None:
    """Some generated answers contain whole calls."""
    for names in ALL:
        if names[0] is not None:
            calls = [f for f in fragments((names[0], None)) if read((names[0], None), [f])]
            found = {type(p) for f in calls for p in read((names[0], None), [f])}
            assert ToolCall in found and Content in found


def test_text_after_a_tag_that_begins_no_code_is_not_held() -> None:
    """Only `<|python_tag|>` introduces built-in tools."""
    one = parser(("llama3", None))
    assert one.push("<|python_start|>S") == [Content("<|python_start|>S")]
