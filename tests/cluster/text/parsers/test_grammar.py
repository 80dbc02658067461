"""The parser reads every text that a grammar allows as valid calls, tested with random walks."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from swell.cluster.text.parsers import PARSERS, tool_format
from swell.cluster.text.parsers.answer_grammar import answer
from swell.cluster.text.parsers.deltas import Content, Tool, ToolCall, collect
from swell.cluster.text.parsers.grammar import GrammarBuilder, marker_expression
from swell.cluster.text.parsers.notations.markup import MarkupParser
from tests.cluster.text.parsers.sample_outputs import MARKERS, read

TOOLS = [
    Tool(
        "get",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "n": {"type": "integer", "minimum": 0}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool(
        "get_flags",
        parameters={
            "$defs": {"Flags": {"type": "array", "items": {"type": "boolean"}}},
            "properties": {"flags": {"$ref": "#/$defs/Flags"}},
            "required": ["flags"],
            "additionalProperties": False,
        },
    ),
    Tool("no-op"),
]
ELEMENTS = Tool(
    "put",
    parameters={
        "type": "object",
        "$defs": {
            "Unit": {"enum": ["C", "F", ""]},
            "Place": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
        "properties": {
            "note": {"type": "string", "minLength": 2, "maxLength": 9},
            "unit": {"$ref": "#/$defs/Unit"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
            "day": {"type": "string", "format": "date"},
            "or_null": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "or_number": {"type": ["string", "number"], "minimum": 3},
            "any": {"description": "anything"},
            "place": {"$ref": "#/$defs/Place"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/Unit"}},
            "level": {"enum": [1, 2, None, "top"]},
        },
        "required": ["unit", "list"],
        "additionalProperties": {"type": "boolean"},
    },
)
"""Schemas that formats with XML-like arguments can enforce."""


def tools(name: str) -> list[Tool]:
    return [*TOOLS, ELEMENTS] if issubclass(tool_format(name), MarkupParser) else TOOLS


EOS = 256
SPECIAL_TEXTS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
SPECIAL_TEXTS += [*MARKERS["glm"][2:], *MARKERS["kimi_k2"], *MARKERS["deepseek_v3"]]
SPECIAL_TEXTS += [*MARKERS["minimax_m2"], "｜DSML｜"]
OWN_TOKENS = ("harmony", "functiongemma", "gemma4", "phi4", "pythonic")
SPECIAL_TEXTS += [text for name in OWN_TOKENS for text in MARKERS[name]]
SPECIAL = {text: EOS + 1 + index for index, text in enumerate(SPECIAL_TEXTS)}
SPANNING = ["}}", '"}', '"}}', "<tool", "_call>\n", '", "', "}; {", '{"', "[TOOL", "<|python"]
SPANNING += [
    "</param",
    "eter>",
    "</parameter>\n",
    "\n</parameter>",
    "</function>",
    "</arg_val",
    "ue>",
]
SPANNING += ["</｜DSML｜parameter>", "</｜DSML｜invoke>\n", "</invoke>\n", "list", "unit"]
"""Tokens that span a boundary between literal text of the grammar and JSON."""

_OPTIONS = [
    pytest.param(name, special, id=f"{name}-{'special' if special else 'text'}")
    for name in PARSERS
    for special in ({}, SPECIAL)
]


class ByteTokenizer:
    """The tokenizer interface that llguidance needs: bytes, an end token, special tokens, longer
    tokens."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = [
        *(bytes([byte]) for byte in range(256)),
        b"<|eos|>",
        *(text.encode() for text in SPECIAL_TEXTS + SPANNING),
    ]
    special_token_ids = [EOS, *SPECIAL.values()]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


_PLAIN = [EOS, *range(32, 127), 10, *"｜▁".encode(), *range(EOS + 1, len(ByteTokenizer.tokens))]
_CLOSING = {*b'"}]', *range(EOS + 1, len(ByteTokenizer.tokens))}
_MARKS = {*SPECIAL.values()}


@pytest.fixture(scope="module")
def llg() -> Any:
    return pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def tokenizer(llg: Any) -> Any:
    return llg.LLTokenizer(llg.TokenizerWrapper(ByteTokenizer()))


def walk(matcher: Any, rng: random.Random, opening: str) -> str | None:
    """Returns a random sentence of the grammar that begins with `opening`, or None if it does not
    end within 500 tokens."""
    ids = list(opening.encode())
    assert matcher.consume_tokens(ids), matcher.get_error()
    for step in range(500):
        mask = matcher.compute_bitmask()
        allowed = [i for i in _PLAIN if mask[i // 8] >> (i % 8) & 1]
        assert allowed, b"".join(ByteTokenizer.tokens[i] for i in ids)
        closing = [i for i in allowed if i in _CLOSING]
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return b"".join(ByteTokenizer.tokens[i] for i in ids).decode()
        choices = closing if closing and rng.random() < min(0.9, 0.2 + step / 100) else allowed
        marks = [i for i in allowed if i in _MARKS]
        if marks and rng.random() < 0.3:
            choices = marks
        token = rng.choice([i for i in choices if i != EOS] or choices)
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return None


BEGUN = {"harmony": "Hm <|channel|>commentary to=fun"}
"""Openings after which an answer must continue with a call."""


def openings(name: str, required: bool, special: dict[str, int]) -> list[str]:
    """Returns openings. Some lead to a call, because random text almost never begins one."""
    if required:
        return [""]
    if special and name not in ("llama3", "pythonic", "deepseek_v32"):
        return ["", "Hm.\n"]
    begun = {"llama3": '{"name": "', "pythonic": "[ge", **BEGUN}
    if special:
        begun["deepseek_v32"] = "Hm <"
    return ["", "Hm.\n", begun.get(name, f"Hm {{\n{MARKERS[name][0]}")]


def written(name: str, *, required: bool, parallel: bool = True, special: dict[str, int]) -> str:
    kind = tool_format(name)
    calls = kind.call_grammar(GrammarBuilder(tools(name), parallel, special))
    start_markers = [opener.strip() for opener in kind.start_markers]
    return answer(calls, special=special, required=required, start_markers=start_markers)


_PAIRS, _OTHERS = [], [pytest.mark.slow_variants]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "special", "required", "parallel"),
    [
        pytest.param(
            *option.values,
            required,
            parallel,
            marks=(_PAIRS, _OTHERS)[odd],
            id=f"{option.id}-{required}-{parallel}",
        )
        for at, option in enumerate(_OPTIONS)
        for required in (False, True)
        for parallel in (False, True)
        for odd in [(at + required + parallel) % 2]
    ],
)
def test_every_sentence_is_read_as_valid_calls(
    llg: Any, tokenizer: Any, name: str, special: dict[str, int], required: bool, parallel: bool
) -> None:
    grammar = written(name, required=required, parallel=parallel, special=special)
    assert llg.LLMatcher.validate_grammar(grammar, tokenizer) == ""
    rng = random.Random(0)
    counts = set()
    for opening in openings(name, required, special) * 16:
        text = walk(llg.LLMatcher(tokenizer, grammar), rng, opening)
        if text is None:
            continue
        parts = read((name, None), [text], tools(name))
        message = collect(parts)
        for call in message.tool_calls:
            tool = next(tool for tool in tools(name) if tool.name == call.name)
            nothing = {"type": "object", "maxProperties": 0}
            jsonschema.validate(json.loads(call.arguments), tool.parameters or nothing)
        first = next((i for i, part in enumerate(parts) if isinstance(part, ToolCall)), len(parts))
        assert not any(isinstance(part, Content) for part in parts[first:]), text
        assert message.content is None or not required, text
        if not message.tool_calls:
            assert (message.content or "") == text
        counts.add(len(message.tool_calls))
    assert min(counts) >= required
    assert max(counts) >= 1 and (max(counts) == 1 or parallel)
    several = parallel and name != "harmony"  # harmony ends the answer after a call
    assert max(counts) > 1 or not (several and required)


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize(("name", "special"), _OPTIONS)
def test_text_is_free_unless_calls_are_required(
    llg: Any, tokenizer: Any, name: str, special: dict[str, int], required: bool
) -> None:
    grammar = written(name, required=required, special=special)
    text = list("The answer, without any call: é {}.".encode())
    matcher = llg.LLMatcher(tokenizer, grammar)
    assert (matcher.try_consume_tokens(text) == len(text)) != required
    if not required:
        assert matcher.is_accepting()
        marker = list(MARKERS[name][0].encode())
        evil = [*marker, *b'\n{"name": "evil", "arguments": {}}']
        assert matcher.try_consume_tokens(evil) < len(evil)


# ------------------------------------------------------------------------- without llguidance


@pytest.mark.parametrize("name", PARSERS)
def test_markers_are_special_tokens_where_the_tokenizer_has_them(name: str) -> None:
    marker = MARKERS[name][0]
    both = [written(name, required=True, special=special) for special in ({}, SPECIAL)]
    texts = [marker_expression(marker, special) for special in ({}, SPECIAL)]
    assert texts[0].strip('"') in both[0] and "<[" not in both[0]
    assert texts[0] not in both[1] and texts[1] in both[1] and "<[" in texts[1]


@pytest.mark.parametrize("name", PARSERS)
def test_an_empty_schema_equals_the_schema_true(name: str) -> None:
    """`{}` and `true` both allow any value (JSON Schema 2020-12, 4.3.2)."""

    def grammar_of(any_value: Any) -> str:
        schema = {"type": "object", "properties": {"a": any_value}}
        tool = Tool("get", parameters={**schema, "additionalProperties": any_value})
        calls = tool_format(name).call_grammar(GrammarBuilder([tool], True, {}))
        return answer(calls, special={}, required=True, start_markers=[]).replace("{}", "true")

    assert grammar_of({}) == grammar_of(True)


@pytest.mark.parametrize("name", PARSERS)
def test_tools_without_a_call_are_refused(name: str) -> None:
    call_grammar = tool_format(name).call_grammar
    with pytest.raises(ValueError, match="at least one tool"):
        call_grammar(GrammarBuilder([], True, {}))
    tool = Tool("f", parameters={"type": "string"})
    with pytest.raises(ValueError, match=r"tool 'f' have the type 'string'.*an object"):
        call_grammar(GrammarBuilder([tool], True, {}))
