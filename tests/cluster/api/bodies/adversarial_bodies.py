"""Requests that try to block the event loop for other clients: within the limits, or just
beyond."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from swell.cluster.text.schema.json_size import (
    MAX_ESCAPES,
    MAX_NODES,
    MAX_SLOW_NUMBERS,
    MAX_VALUES,
)
from tests.cluster.api.server.loop_stall import post

MIB = 1 << 20
BODY = 16 * MIB - 4096
"""The largest JSON text that fits into a body, in bytes."""

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
SAY = {"role": "user", "content": "hi"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [SAY], "max_tokens": 5},
    TEXT: {"model": "fake", "prompt": [1], "max_tokens": 5},
    RESPONSES: {"model": "fake", "input": "hi", "max_output_tokens": 16},
    MESSAGES: {"model": "fake", "messages": [SAY], "max_tokens": 5},
    COUNT: {"model": "fake", "messages": [SAY]},
    TOKENIZE: {"model": "fake", "prompt": "x"},
    DETOKENIZE: {"model": "fake", "tokens": [1]},
}
FIELD = {
    CHAT: "messages",
    TEXT: "prompt",
    RESPONSES: "input",
    MESSAGES: "messages",
    COUNT: "messages",
    TOKENIZE: "prompt",
    DETOKENIZE: "tokens",
}
"""Route -> the field that is filled to make its body large."""
_ROUTES_PER_KIND = 3
"""The number of routes that get each kind of damage."""


def fill(part: bytes, size: int = BODY, by: bytes = b",") -> bytes:
    """Repeats a part as often as `size` bytes allow."""
    return ((part + by) * (size // (len(part) + len(by)))).removesuffix(by)


def with_field(path: str, name: str, raw: bytes, **extra: Any) -> bytes:
    """Returns a request whose field `name` is this JSON text."""
    head = {**BASE[path], **extra}
    head.pop(name, None)
    return post(path, json.dumps(head)[:-1].encode() + f', "{name}": '.encode() + raw + b"}")


def _some_routes(kinds: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yields route, field and kind: each kind in three routes, and each route with its share of the
    kinds."""
    fields = [*FIELD.items()]
    for number, kind in enumerate(kinds):
        for turn in range(_ROUTES_PER_KIND):
            path, field = fields[(number + turn) % len(fields)]
            yield path, field, kind


def at_every_route() -> Iterator[tuple[str, bytes]]:
    """Yields bodies whose main field is damaged. All routes share one reader, so each kind of
    damage goes to three routes, and each route gets six kinds. Damage outside the main field goes
    to every route."""
    values = {
        "numbers": b"[" + fill(b"1") + b"]",
        "long numbers": b"[" + fill(b"12345.678901234567890123") + b"]",
        "texts": b"[" + fill(b'"a"') + b"]",
        "arrays": b"[" + fill(b"[]") + b"]",
        "objects": b"[" + fill(b"{}") + b"]",
        "deep": b"[" * 900_000 + b"]" * 900_000,
        "one text": b'"' + b"a" * BODY + b'"',
        "escapes": b'"' + fill(b"\\u4e2d", by=b"") + b'"',
        "quotes": b'"' + fill(b'\\"', by=b"") + b'"',
        "surrogate at the end": b'["' + fill(b"abc", by=b"") + b'", "\\ud800"]',
        "broken at the end": b"[" + fill(b"1") + b",]",
        "NaN at the end": b"[" + fill(b"1", MIB) + b",NaN]",
        "huge number": b"[" + b"1" * BODY + b"]",
        "small": b"[" + fill(b"{}", 7000) + b"]",
    }
    for path, field, name in _some_routes(values):
        yield f"{path} {name}", with_field(path, field, values[name])
    long_name = b'{"model": "fake", "' + b"x" * BODY + b'": 1}'
    backticks = b'{"model": "fake", "' + fill(b"` | `", by=b"") + b'": 1}'
    keys = ",".join(f'"k{index}":1' for index in range(900_000)).encode()
    for path in FIELD:
        yield f"{path} long unknown field", post(path, long_name)
        yield f"{path} unknown field of backticks", post(path, backticks)
        yield f"{path} many unknown fields", post(path, b"{" + keys + b"}")


def _values_just_within() -> dict[str, bytes]:
    """Returns each kind of JSON value, as large as a body may be."""
    nodes = MAX_NODES - 64

    def some(part: bytes, count: int) -> bytes:
        return b"[" + b",".join([part] * count) + b"]"

    keys = ",".join(f'"k{index}":1' for index in range(nodes)).encode()
    return {
        "numbers": some(b"131071", MAX_VALUES - 64),
        "floats": some(b"12345.678901234", MAX_VALUES - 64),
        "texts": some(b'"ab"', nodes),
        "arrays": some(b"[]", nodes),
        "arrays of one": some(b"[1]", nodes),
        "objects": some(b"{}", nodes),
        "objects of one": some(b'{"a":1}', nodes // 2),
        "keys": b"{" + keys + b"}",
        "escapes": b'"' + b"\\u4e2d" * (MAX_ESCAPES - 64) + b'"',
        "exponents": some(b"1e300", MAX_SLOW_NUMBERS - 64),
        "long numbers": some(b"1." + b"1" * 120 + b"e-300", MAX_SLOW_NUMBERS - 64),
        "long integers": some(b"1" * 127, MAX_SLOW_NUMBERS - 64),
    }


def just_within() -> Iterator[tuple[str, bytes]]:
    """Yields the largest values in the main fields of three routes each, and in two fields that
    accept any value."""
    values = _values_just_within()
    for path, field, name in _some_routes(values):
        yield f"{path} just within: {name}", with_field(path, field, values[name])
    for name, raw in values.items():
        yield f"metadata just within: {name}", with_field(TEXT, "metadata", raw)
        schema = b'{"json": {"enum": ' + raw + b"}}"
        yield f"schema just within: {name}", with_field(TEXT, "structured_outputs", schema)


def just_within_at_every_route() -> Iterator[tuple[str, bytes]]:
    for path, field in FIELD.items():
        for name, raw in _values_just_within().items():
            yield f"{path} just within: {name}", with_field(path, field, raw)


def conversations() -> Iterator[tuple[str, bytes]]:
    said = b'{"role":"user","content":"hi"}'
    parts = b'{"type":"text","text":"a"}'
    for path in (CHAT, MESSAGES, COUNT, RESPONSES):
        field = FIELD[path]
        for size, name in ((BODY, "many"), (MIB, "1 MiB of")):
            yield f"{path} {name} messages", with_field(path, field, b"[" + fill(said, size) + b"]")
            part = parts if path != RESPONSES else parts.replace(b'"text",', b'"input_text",')
            whole = b'[{"role":"user","content":[' + fill(part, size) + b"]}]"
            yield f"{path} {name} content parts", with_field(path, field, whole)
    turn = b'{"role":"user","content":"' + b"a " * 500 + b'"}'
    for path in (CHAT, MESSAGES, COUNT, RESPONSES):
        joined = b"[" + fill(turn, 3 * MIB) + b"]"
        yield f"{path} long messages of one role", with_field(path, FIELD[path], joined)
    call = b'{"type":"tool_use","id":"a","name":"f","input":{"a":1}}'
    calls = b'[{"role":"assistant","content":[' + fill(call, 3 * MIB) + b"]}]"
    yield f"{MESSAGES} many calls", with_field(MESSAGES, "messages", calls)
    item = b'{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}'
    yield f"{RESPONSES} many calls", with_field(RESPONSES, "input", b"[" + fill(item, MIB) + b"]")
    item = (
        b'{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"abcdef"}]}'
    )
    yield (
        f"{RESPONSES} many reasoning items",
        with_field(RESPONSES, "input", b"[" + fill(item, 3 * MIB) + b"]"),
    )
    final = "a" * 40_000 + "b" + "a" * 40_000
    going_on = [
        {"role": "user", "content": "a" * 120_000},
        {"role": "assistant", "content": final},
    ]
    yield (
        f"{CHAT} goes on with a long message",
        with_field(CHAT, "messages", json.dumps(going_on).encode(), continue_final_message=True),
    )


def tools() -> Iterator[tuple[str, bytes]]:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    named = [
        {**tool, "function": {**tool["function"], "name": f"f{index}"}} for index in range(100_000)
    ]
    yield f"{CHAT} many tools", with_field(CHAT, "tools", json.dumps(named).encode())
    flat = [{"type": "function", **one["function"]} for one in named]
    yield f"{RESPONSES} many tools", with_field(RESPONSES, "tools", json.dumps(flat).encode())
    theirs = [
        {"name": one["function"]["name"], "input_schema": {"type": "object"}} for one in named
    ]
    yield f"{MESSAGES} many tools", with_field(MESSAGES, "tools", json.dumps(theirs).encode())
    wide = {
        "type": "object",
        "properties": {f"p{index}": {"type": "string"} for index in range(6000)},
    }
    strict = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": wide}}]
    yield f"{CHAT} a wide strict tool", with_field(CHAT, "tools", json.dumps(strict).encode())


def forms() -> Iterator[tuple[str, bytes]]:
    kib = 1024
    deep: Any = {}
    for _ in range(400):
        deep = {"properties": {"a": deep}}
    wide = {"type": "object", "properties": {f"p{n}": {"enum": [n]} for n in range(100_000)}}
    grammars = {
        "quotes": '"' + '\\"' * (128 * kib - 2),
        "quote pairs": '"a' * (100 * kib),
        "slashes": "start: /" + "\\/" * (120 * kib),
        "angles": "<" * (255 * kib),
        "lines": "start: a\n" * (25 * kib),
        "newlines": "start: \n" + "\n" * (250 * kib),
        "parentheses": "start: " + "(" * (250 * kib),
        "GBNF": "root ::= " + "a | " * (7 * kib) + "a",
        "GBNF rules": "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in range(1800)),
        "GBNF quotes": "root ::= " + '"' * (31 * kib),
        "GBNF brackets": "root ::= " + "[" * (31 * kib),
    }
    for name, text in grammars.items():
        yield (
            f"grammar of {name}",
            with_field(TEXT, "structured_outputs", json.dumps({"grammar": text}).encode()),
        )
    expressions = {
        "stars": "(a*)*" * (40 * kib),
        "counts": "(a{1,1000}){1,1000}" * 100,
        "alternatives": "a|" * (120 * kib),
        "classes": "[" * (200 * kib),
        "groups": "(" * (200 * kib),
        "escapes": "\\d" * (120 * kib),
    }
    for name, text in expressions.items():
        yield (
            f"regex of {name}",
            with_field(TEXT, "structured_outputs", json.dumps({"regex": text}).encode()),
        )
    choices = [f"choice {n}" for n in range(9999)]
    for name, form in (
        ("choices", {"choice": choices}),
        ("too many choices", {"choice": ["a"] * 100_000}),
        ("deep schema", {"json": deep}),
        ("wide schema", {"json": wide}),
        ("schema as text", {"json": json.dumps(wide)}),
        ("long description", {"json": {"description": "中" * 3_000_000}}),
        ("deep schema as text", {"json": "[" * 100_000}),
    ):
        yield name, with_field(TEXT, "structured_outputs", json.dumps(form).encode())
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": wide}}
    yield (
        "wide response_format",
        with_field(CHAT, "response_format", json.dumps(schema).encode()),
    )


def sampling_fields() -> Iterator[tuple[str, bytes]]:
    """Yields bodies with many or large fields that control sampling."""

    def made(name: str, value: Any, **extra: Any) -> bytes:
        return with_field(TEXT, name, json.dumps(value).encode(), **extra)

    yield "many stops", made("stop", ["a"] * 1_000_000)
    yield "long stops", made("stop", [chr(97 + n) * 1024 for n in range(16)])
    yield "a long stop", made("stop", "a" * 8 * MIB)
    yield "many bad words", made("bad_words", ["word " * 200] * 256)
    yield "too many bad words", made("bad_words", ["a"] * 1_000_000)
    yield "many biases", made("logit_bias", {str(n): 1.0 for n in range(500_000)})
    yield "biases of long names", made("logit_bias", {str(n) * 1000: 1.0 for n in range(1, 1000)})
    yield "many allowed tokens", made("allowed_token_ids", [1] * 2_000_000)
    yield "many stop tokens", made("stop_token_ids", [1] * 2_000_000)
    yield "large user", made("user", [[]] * 1_000_000)
    yield "large metadata", made("metadata", {f"k{n}": "v" for n in range(300_000)})
    yield "large n", made("n", int("9" * 4000))
    yield "1024 texts, 128 answers", made("prompt", ["hi"] * 1024, n=128)
    yield "1024 ids, 128 answers", made("prompt", [[1]] * 1024, n=128)
    yield "1025 prompts", made("prompt", [[1]] * 1025)
    yield "a million prompts", made("prompt", [[1]] * 1_000_000)
    yield "mixed prompts", made("prompt", [*[[1]] * 1000, "x"])
    yield "a bad id at the end", made("prompt", [*[1] * 130_000, 10**6])
    yield "blanks", made("prompt", " " * 8 * MIB)
    yield "long text that does not fit", made("prompt", "hello world, " * 100_000)
    for path in (CHAT, MESSAGES, RESPONSES, TOKENIZE):
        kwargs = json.dumps({f"k{n}": n for n in range(200_000)}).encode()
        yield f"{path} template variables", with_field(path, "chat_template_kwargs", kwargs)


def accepted() -> Iterator[tuple[str, bytes]]:
    """Yields requests that reach an engine."""

    def made(name: str, value: Any, **extra: Any) -> bytes:
        return with_field(TEXT, name, json.dumps(value).encode(), **extra)

    yield "1024 texts", made("prompt", ["hello there"] * 1024)
    yield "1024 prompts of 100 ids", made("prompt", [[n % 400] * 100 for n in range(1024)])
    yield "128 answers to 1000 ids", made("prompt", [7] * 1000, n=128)
    yield "8 answers to 100 000 ids", made("prompt", [7] * 100_000, n=8)
    yield "a long text", made("prompt", "it's 12:45 " * 20_000)


def histories() -> Iterator[tuple[str, bytes]]:
    """Yields histories with as many ignored fields as a body may hold."""
    nodes, values = MAX_NODES - 64, MAX_VALUES - 64
    keys = b",".join(b'"k%d":1' % n for n in range(nodes - 64))
    much = {
        "numbers": b'"mine":[' + b",".join([b"1"] * (values - 64)) + b"]",
        "arrays": b'"mine":[' + b",".join([b"[]"] * (nodes - 64)) + b"]",
        "names": keys,
        "long name": b'"' + b"x" * (BODY - 1000) + b'":1',
        "long text": b'"mine":"' + b"x" * (BODY - 1000) + b'"',
        "escapes": b'"mine":"' + b"\\u4e2d" * (MAX_ESCAPES - 64) + b'"',
        "same name": b",".join([b'"parsed":1'] * (nodes - 64)),
    }
    bodies = {
        CHAT: (b'{"messages":[', b'{"role":"user","content":"hi",%b}', b'],"max_tokens":5}'),
        RESPONSES: (b'{"input":[', b'{"role":"user","content":"hi",%b}', b"]}"),
        COUNT: (b'{"messages":[', b'{"role":"user","content":"hi",%b}', b"]}"),
    }
    for path, (before, message, behind) in bodies.items():
        for name, fields in much.items():
            yield f"{path} {name}", post(path, before + message % fields + behind)
        turn = message % b'"parsed":{},"mine":[1]'
        turns = b",".join([turn] * (nodes // 10))
        yield f"{path} turns", post(path, before + turns + behind)
        part = b'{"role":"user","content":[%b]}'
        parts = b",".join([b'{"type":"input_text","text":"a","mine":1}'] * (nodes // 8))
        yield f"{path} parts", post(path, before + part % parts + behind)
    for name, fields in much.items():
        tool = b'{"type":"function","function":{"name":"f",%b}}' % fields
        yield f"tool {name}", with_field(CHAT, "tools", b"[" + tool + b"]", tool_choice="none")
        yield f"alias {name}", with_field(CHAT, "max_new_tokens", b"{" + fields + b"}")


def packed() -> Iterator[tuple[str, bytes]]:
    """Yields small bodies that decompress to large ones."""
    bodies = {
        "a bomb": b" " * 64 * MIB,
        "spaces": json.dumps(BASE[TEXT]).encode() + b" " * (BODY - 100),
        "one text": b'{"model":"fake","prompt":"' + b"a" * (BODY - 100) + b'"}',
        "numbers": b'{"model":"fake","prompt":[' + fill(b"1") + b"]}",
    }
    for name, body in bodies.items():
        for coding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
            yield f"{name} {coding}", post(TEXT, pack(body, 1), f"Content-Encoding: {coding}")
    yield (
        "a bomb in a bomb",
        post(TEXT, gzip.compress(gzip.compress(bytes(64 * MIB), 1)), "Content-Encoding: gzip"),
    )
    yield "empty members", post(TEXT, gzip.compress(b"") * 500_000, "Content-Encoding: gzip")
    yield (
        "members of a byte",
        post(TEXT, gzip.compress(b" ") * 1024 + gzip.compress(b"{}"), "Content-Encoding: gzip"),
    )
    stored = zlib.compressobj(0, zlib.DEFLATED, -15)
    tiny = b"".join(stored.compress(b" ") + stored.flush(zlib.Z_FULL_FLUSH) for _ in range(10_000))
    yield "tiny blocks", post(TEXT, tiny * 100 + stored.flush(), "Content-Encoding: deflate")


def long_answers() -> Iterator[tuple[str, bytes]]:
    """Yields requests whose answers have few tokens but much to report, e.g. the echo of a long
    prompt."""

    def made(**payload: Any) -> bytes:
        return post(TEXT, {**BASE[TEXT], "echo": True, "return_token_ids": True, **payload})

    long = [7] * 50_000
    yield "echo of a long prompt", made(prompt=long)
    yield "64 echoes of a long prompt", made(prompt=long, n=64)
    yield "64 streamed echoes of a long prompt", made(prompt=long, n=64, stream=True)
    yield "echoes of 1000 prompts", made(prompt=[[7] * 500] * 1000)


def heads() -> Iterator[tuple[str, bytes]]:
    """Yields hostile request heads."""
    line = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    yield "a long header", line + b"X-Long: " + b"a" * 64 * MIB
    yield "many headers", line + b"a: b\r\n" * 4_000_000
    yield "a long URL", b"GET /" + b"a" * 64 * MIB
    yield "a long method", b"A" * 16 * MIB
    yield "pipelined", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 100_000
    tiny = b"1\r\nx\r\n" * 2_000_000
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        "Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    ).encode()
    yield "tiny chunks", head + tiny
    yield "long chunk extension", head + b"1;" + b"a" * 32 * MIB + b"\r\nx\r\n"
    yield "many trailers", head + b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * 4_000_000
    yield "body too long", post(TEXT, b'"' + b"a" * 64 * MIB)


def everything() -> Iterator[tuple[str, bytes]]:
    yield from heads()
    yield from at_every_route()
    yield from just_within()
    yield from conversations()
    yield from tools()
    yield from forms()
    yield from sampling_fields()
    yield from accepted()
    yield from histories()
    yield from packed()
