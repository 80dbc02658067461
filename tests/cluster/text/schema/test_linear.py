"""The work for client input grows linearly with its length, not quadratically.

Each function reads hostile texts of one size and of eight times that size. With linear work the
second takes 8 times the CPU time of the first, with quadratic work 64 times.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.messages.convert import conversation as of_messages
from swell.cluster.api.messages.protocol import MessagesRequest
from swell.cluster.api.responses.convert import chat_messages, name_of
from swell.cluster.api.responses.input_items import read_input
from swell.cluster.api.server.access import host_name
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.grammar import lark_compiler, structured_output, user_grammar
from swell.cluster.text.json_grammar import ecma_patterns, string_patterns
from swell.cluster.text.json_grammar.object_merging import literal
from swell.cluster.text.json_grammar.schema_keywords import SchemaKeywords
from swell.cluster.text.parsers import PARSERS, REASONING, make_parser
from swell.cluster.text.parsers.reasoning import ThinkParser
from swell.cluster.text.partial_arguments import PartialObject
from swell.cluster.text.prompt.prompt_processor import PromptProcessor
from swell.cluster.text.schema.chat_messages import ChatMessage
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.schema.json_size import count_json
from swell.cluster.text.schema.strict_json import check_strict
from swell.cluster.text.tokens.stop_strings import StopChecker
from swell.configs.error_text import shown
from swell.configs.files.yaml_text import read_yaml
from swell.configs.schema import ConfigError
from tests.cluster.text.tokenizers_for_tests import chat_tokenizer

pytestmark = pytest.mark.slow

SMALL = 2000
GROWTH = 8
LIMIT = 30
PROMPTS = PromptProcessor(chat_tokenizer(), 10**6, 500, "m")
FLOOR_S = 0.0005
"""Times below this are noise, in seconds."""

PATTERNS = (
    *(
        '"',
        '\\"',
        "\\",
        '"a',
        "/",
        "\\/",
        "/a",
        "<",
        "<a",
        ">",
        "#",
        "//",
        "\n",
        " ",
        " \n",
        "\n 1",
    ),
    *("1", "-", "e", "a", "a ", "a::=", "(", "[", "{", "}", "]", ",", ":"),
    *("`", "` | `", " - at `"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n<tool_call>", "[TOOL_CALLS]"),
    *("[TOOL_CALLS]f[ARGS]{", '{"name":', '{"name": "f", "arguments": {', "<|python_tag|>", ";"),
    *("messages[1]", "max_tokens", "response_format.", "\\u", "\\ud800", "<\\n", "Error: "),
)


def parsed(name: str | None, reasoning: str | None) -> Callable[[str], object]:
    def run(text: str) -> None:
        parser = make_parser(name, reasoning)
        for start in range(0, len(text), 7):
            parser.push(text[start : start + 7])
        parser.flush()

    return run


def object_text(text: str) -> None:
    reader = PartialObject()
    given = "".join(reader.push('{"a": "' + text[n : n + 7]) for n in range(0, len(text), 7))
    reader.close(given)


def stopped(text: str) -> None:
    checker = StopChecker([text[:200] + "!", text[:100] + "?"])
    for start in range(0, len(text), 7):
        checker.push(text[start : start + 7], start)


def control_tokens(text: str) -> None:
    messages = [ChatMessage(role="user", content=text), ChatMessage(role="user", content="<s>")]
    PROMPTS.chat_prompt(messages)


def chat(text: str) -> None:
    content = {"model": "m", "messages": [{"role": "user", "content": text}]}
    decode(msgspec.json.encode(content), ChatCompletionRequest)


def strict(text: str) -> None:
    for body in (text, text.replace('"', ""), f'["{text}', f'[1,"{text}",1]'):
        with contextlib.suppress(BadRequest):
            check_strict(body.encode())


def yaml(text: str) -> None:
    for line in (text, f"a: '{text}", f"a: {text}", f"a: |\n  {text}"):
        with contextlib.suppress(ConfigError):
            read_yaml(line.encode(), "it")


READERS: dict[str, Callable[[str], object]] = {
    "grammar tokens": lambda text: list(user_grammar._LARK_PART.finditer(text)),
    "GBNF": lambda text: user_grammar._GBNF_RULE.search(text),
    "GBNF escapes": lambda text: user_grammar._GBNF_ESCAPE.sub(user_grammar._plain_escape, text),
    "excerpts": lambda text: lark_compiler._EXCERPT.split("\n" + text),
    "places": lambda text: lark_compiler._PLACE.sub("", "at 1(1" + text),
    "quoted": literal,
    "regex": lambda text: structured_output._regex(text, "p", SchemaKeywords()),
    "parts that look ahead": lambda text: string_patterns.split_lookahead(f"^(?!{text})"),
    "patterns": ecma_patterns.library_pattern,
    "patterns that are lists": lambda text: string_patterns.fixed_texts(f"^({text})$"),
    "counted": lambda text: list(count_json(text.encode())),
    "counted outside": lambda text: list(count_json(text.replace('"', "").encode())),
    "strict": strict,
    "YAML": yaml,
    "body": chat,
    "no body": lambda text: decode(text.encode(), ChatCompletionRequest),
    "unknown field": lambda text: decode(json.dumps({text: 1}).encode(), ChatCompletionRequest),
    "wrong field": lambda text: BadRequest(text, text).renamed(name_of),
    "shown": shown,
    "host": host_name,
    "end of a prompt": ThinkParser.opened_by_prompt,
    "object text": object_text,
    "stops": stopped,
    "control tokens": control_tokens,
    **{f"parser {name}": parsed(name, None) for name in PARSERS},
    **{f"reasoning {name}": parsed("hermes", name) for name in REASONING},
}


def cost_s(read: Callable[[Any], object], value: Any) -> float:
    start_s = time.thread_time()
    with contextlib.suppress(BadRequest, ValueError):
        read(value)
    return time.thread_time() - start_s


def growth(read: Callable[[Any], object], make: Callable[[int], Any]) -> float:
    """Returns the minimum cost of the large input divided by that of the small one, or an upper
    bound of it below the limit. A round reads the small one twice: the first call of a function
    takes longer. Takes up to twenty rounds while
    the ratio is too high, because the CPU may change its speed between them. Quadratic work stays
    above the limit."""
    small, large = make(SMALL), make(SMALL * GROWTH)
    small_s, large_s = math.inf, cost_s(read, large)
    if large_s < LIMIT * FLOOR_S:
        return large_s / FLOOR_S
    for _ in range(20):
        small_s = max(min(small_s, cost_s(read, small), cost_s(read, small)), FLOOR_S)
        large_s = min(large_s, cost_s(read, large))
        if large_s / small_s < LIMIT:
            break
    return large_s / small_s


@pytest.mark.parametrize("name", READERS)
def test_texts_are_read_in_linear_time(name: str) -> None:
    """Each pattern is read by itself and after an opening quote."""
    for pattern in PATTERNS:
        for begin in ("", '"'):

            def text(chars: int, begin: str = begin, pattern: str = pattern) -> str:
                return begin + pattern * (chars // len(pattern))

            ratio = growth(READERS[name], text)
            assert ratio < LIMIT, f"{name} of {begin + pattern!r}: {ratio:.0f} times the work"


def messages(turn: dict[str, Any]) -> Callable[[int], MessagesRequest]:
    return lambda count: msgspec.convert(
        {"model": "m", "max_tokens": 1, "messages": [turn] * count}, MessagesRequest
    )


def items(item: dict[str, Any]) -> Callable[[int], list[msgspec.Raw]]:
    return lambda count: [msgspec.Raw(json.dumps(item).encode())] * (count // 2)


REASONED = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a" * 500}]}
CONVERSIONS: dict[str, tuple[Callable[[Any], object], Callable[[int], Any]]] = {
    "messages of one role": (of_messages, messages({"role": "user", "content": "a" * 500})),
    "answers in a row": (of_messages, messages({"role": "assistant", "content": "a" * 500})),
    "calls": (
        lambda raw: chat_messages(read_input(raw)),
        items({"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}),
    ),
    "reasoning": (lambda raw: chat_messages(read_input(raw)), items(REASONED)),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversations_are_converted_in_linear_time(name: str) -> None:
    convert, make = CONVERSIONS[name]
    ratio = growth(convert, make)
    assert ratio < LIMIT, f"{name}: {ratio:.0f} times the work"
