r"""Patterns of schemas are those of ECMA 262: a grammar accepts the texts that its engines accept.

Two oracles: Python's `re` for patterns of the notation that it shares with ECMA 262, drawn at
random, and the verdicts of Node.js in `ecma_verdicts.json` for all others.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.grammar.structured_output import compile_grammar
from swell.cluster.text.params.sampling_params import StructuredOutputs
from tests.cluster.text.schema.test_schema_walks import BYTES

TABLE = Path(__file__).with_name("ecma_verdicts.json")
VERDICTS: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
"""Maps a pattern to its `mode` (`u`: with the flag u; `legacy`: only without it; `invalid`) and to
the verdict on each text."""
NODE_SCRIPT = r"""
const judge = (pattern, texts) => {
  for (const [flags, mode] of [["u", "u"], ["", "legacy"]]) {
    let found;
    try { found = new RegExp(pattern, flags); } catch { continue; }
    return { mode, texts: Object.fromEntries(texts.map((text) => [text, found.test(text)])) };
  }
  return { mode: "invalid", texts: Object.fromEntries(texts.map((text) => [text, false])) };
};
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
const judged = Object.entries(given).map(([pattern, texts]) => [pattern, judge(pattern, texts)]);
console.log(JSON.stringify(Object.fromEntries(judged)));
"""
NOTHING = ("no answer can match", "Unsatisfiable", "no text matches")
UNENFORCED = "cannot be enforced"
FROM_ELSEWHERE = {
    "(?i)^a$": {"a": True, "A": True, "b": False, "aa": False},
    "^(?i:a)b$": {"ab": True, "Ab": True, "AB": False},
    "(?i)^a": {"a": True, "A": True, "b": False, "aa": True},
    r"^(?P<year>\d)-b$": {"1-b": True, "a-b": False},
}
"""Patterns that some engines for ECMA 262 do not read, with verdicts on texts."""


def judged_by_node(texts: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    command = ["node", "-e", NODE_SCRIPT]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True)
    verdicts: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return verdicts


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_node_returns_the_stored_verdicts() -> None:
    assert judged_by_node({one: [*found["texts"]] for one, found in VERDICTS.items()}) == VERDICTS


def accepted(lark: str, values: list[Any]) -> list[Any]:
    matcher = LLMatcher(BYTES, lark, log_level=0)
    return [value for value in values if _takes(matcher.deep_copy(), value)]


def _takes(matcher: LLMatcher, value: Any) -> bool:
    tokens = [*json.dumps(value, ensure_ascii=False).encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def can_be_written(pattern: str, text: str) -> bool:
    """Strings with a pattern that looks ahead cannot have escapes, and sets of characters exclude
    U+0000."""
    if "\0" in text and pattern != r"^\0$":
        return False
    looks_ahead = pattern.startswith(("^(?=", "^(?!"))
    return not looks_ahead or json.dumps(text, ensure_ascii=False) == f'"{text}"'


def compiled(pattern: str, *, of_names: bool = False) -> tuple[str, str]:
    """Returns the grammar of strings with a pattern (or of an object with one property, whose name
    has the pattern), or the reason of its refusal."""
    schema: dict[str, Any] = {"type": "string", "pattern": pattern}
    if of_names:
        schema = {"patternProperties": {pattern: {}}, "additionalProperties": False}
        schema |= {"type": "object", "minProperties": 1}
    try:
        return compile_grammar(StructuredOutputs(json=schema)).lark, ""
    except BadRequest as error:
        return "", error.message


@pytest.mark.parametrize("pattern", VERDICTS)
def test_a_grammar_accepts_the_texts_that_node_accepts(pattern: str) -> None:
    mode, verdicts = VERDICTS[pattern]["mode"], VERDICTS[pattern]["texts"]
    texts = [text for text in verdicts if can_be_written(pattern, text)]
    matching = [text for text in texts if verdicts[text]]
    lark, reason = compiled(pattern)
    if lark:
        assert mode != "invalid"
        assert accepted(lark, texts) == matching
    elif mode == "u" and matching:
        assert UNENFORCED in reason, reason
    else:
        is_none = any(one in reason for one in NOTHING) and not matching
        assert is_none or repr(pattern) in reason or UNENFORCED in reason, reason


@pytest.mark.parametrize("pattern", FROM_ELSEWHERE)
def test_notations_that_mean_the_same_everywhere_are_accepted(pattern: str) -> None:
    texts = FROM_ELSEWHERE[pattern]
    assert accepted(compiled(pattern)[0], [*texts]) == [one for one in texts if texts[one]]


# ---------------------------------------------------------------------------- shared with `re`

_CHARS = "ab9_&-~[]^$.|/ \"'<>{}()%é"
_CLASS_ITEMS = st.one_of(
    st.sampled_from([*'ab9_&~[$.|/ ""<>{}(%é', "&&", "~~", "||", "--", "[[", ":", "[:alpha:"]),
    st.sampled_from([r"\d", r"\w", r"\D", r"\W", r"\]", r"\\", r"\^", r"\-", r"\.", r"\$", r"\/"]),
    st.sampled_from(["a-b", "%-/", "<->", r"\$-\/", "_-~", "A-Z"]),
)
_ATOMS = st.one_of(
    st.sampled_from([*'ab9_&-~/ "<>%é]}', ".", r"\d", r"\w", r"\W", r"\D"]),
    st.sampled_from([r"\.", r"\$", r"\^", r"\\", r"\-", r"\/", r"\[", r"\|", r"\(", r"\{", r"\""]),
    st.builds(
        lambda negated, first, items, last: f"[{negated}{first}{''.join(items)}{last}]",
        st.sampled_from(["", "^", "^"]),
        _CLASS_ITEMS.filter(lambda item: item != "--"),
        st.lists(_CLASS_ITEMS, max_size=2),
        st.sampled_from(["", "-"]),
    ),
)
_REPEATED = st.builds(
    lambda atom, times: atom + times,
    _ATOMS,
    st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "+?", "{1,2}?"]),
)
_RUNS = st.lists(_REPEATED, min_size=1, max_size=3).map("".join)
_PARTS = st.one_of(
    _RUNS,
    st.builds(lambda one, two, times: f"({one}|{two}){times}", _RUNS, _RUNS, st.sampled_from("?*")),
)
_AHEAD = st.builds(
    lambda kind, body, end: f"({kind}{body}{end})",
    st.sampled_from(["?!", "?=", "?!.*"]),
    _RUNS,
    st.sampled_from(["", "$"]),
)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    body = "".join(draw(st.lists(_PARTS, min_size=1, max_size=2)))
    if draw(st.integers(0, 2)) == 0:
        ahead = "".join(draw(st.lists(_AHEAD, min_size=1, max_size=2)))
        return f"^{ahead}{body}{draw(st.sampled_from(['', '$']))}"
    return draw(st.sampled_from(["^", ""])) + body + draw(st.sampled_from(["$", "$", ""]))


_TEXTS = st.lists(st.text(st.sampled_from(_CHARS), max_size=4), min_size=10, max_size=30)


@settings(deadline=None, max_examples=60)
@given(patterns(), _TEXTS)
@example(r"^(?!a\$)a.*$", ["a$", "a", "ab"])
@example(r"^(?!a\\$)a.*$", ["a\\", "a", "ab"])
@example(r"^[^&&a]$", ["&", "a", "b"])
@example(r"^[^%--a]$", ["&", "a", "b", "-"])
@example(r"^[^[]+$", ["[", "a"])
@example(r'^[^"/]+$', ['"', "/", "a", "\\"])
@example(r"^[^\\]+$", ['"', "/", "a", "\\"])
def test_a_grammar_accepts_the_texts_that_re_accepts(pattern: str, texts: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a change that did not come
        try:
            found = re.compile(pattern, re.ASCII)
        except re.error:
            reject()  # such as [\d--], which only ECMA 262 reads
    texts = [text for text in texts if can_be_written(pattern, text)]
    lark, reason = compiled(pattern)
    if lark:
        assert accepted(lark, texts) == [text for text in texts if found.search(text)], pattern
    else:
        assert any(one in reason for one in NOTHING), (pattern, reason)
        assert not [text for text in texts if found.search(text)], (pattern, reason)
    texts = [text for text in texts if json.dumps(text, ensure_ascii=False) == f'"{text}"']
    lark, reason = compiled(pattern, of_names=True)
    if lark:
        names = [
            name for object_ in accepted(lark, [{one: 0} for one in texts]) for name in object_
        ]
        assert names == [text for text in texts if found.search(text)], pattern
    else:
        is_none = any(one in reason for one in NOTHING)
        assert is_none or any(one in reason for one in ("^ and $", "look-around")), reason
