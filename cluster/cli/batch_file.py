"""OpenAI's batch file format: the lines of the input and of the output, and which are missing.

    input   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    output  {"id": "batch_req_...", "custom_id": "a", "response": {...} | null,
             "error": {...} | null}

The id of an output line is a digest of the input line and its number. So an output file tells which
lines of the input it answers, even lines without a readable `custom_id`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

import msgspec
from msgspec import Raw, Struct

from swell.configs.section import ConfigError

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    *("/classify", "/v1/classify"),
    *("/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank"),
)
"""The routes whose requests a batch may contain."""
ENVELOPE_BYTES = 64 * 1024
"""How much longer than the longest body a line may be."""
_MAX_SHOWN = 80


class BatchError(Struct, frozen=True):
    """Why a line got no response: the fields of OpenAI's `BatchError`."""

    code: str
    message: str
    line: int
    param: str | None = None


class BatchResponse(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class OutputLine(Struct, frozen=True):
    """One line of the output, with either a response or an error."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


class InputLine(NamedTuple):
    """One line of the input."""

    number: int
    id: str
    """The id of its output line."""
    custom_id: str | None
    """None: it cannot be read."""
    url: str = ""
    body: bytes = b""
    error: BatchError | None = None
    """The reason if it is not a request."""


class _Fields(Struct):
    custom_id: object = None
    method: object = None
    url: object = None
    body: Raw = Raw(b"")


class _Stream(Struct):
    stream: object = None


_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode_fields = msgspec.json.Decoder(_Fields).decode
_decode_stream = msgspec.json.Decoder(_Stream).decode


def read_input(file: BinaryIO, max_line_bytes: int) -> Iterator[InputLine]:
    """Yields the lines of an input that are not empty. A line that is too long is not held in
    memory as a whole."""
    number = 0
    while raw := file.readline(max_line_bytes + 1):
        number += 1
        is_whole = len(raw) <= max_line_bytes or raw.endswith(b"\n")
        end = raw
        while not (is_whole or end.endswith(b"\n")) and (end := file.readline(max_line_bytes)):
            pass
        if text := raw.strip():
            yield _parsed(number, text, max_line_bytes if not is_whole else None)


def _parsed(number: int, text: bytes, too_long_for: int | None) -> InputLine:
    digest = blake2b(b"%d:" % number + text, digest_size=16).hexdigest()
    id, custom_id = f"batch_req_{digest}", None

    def refused(code: str, message: str, param: str | None = None) -> InputLine:
        error = BatchError(code, f"line {number}: {message}", number, param)
        return InputLine(number, id, custom_id, error=error)

    if too_long_for is not None:
        return refused("line_too_long", f"it has more than {too_long_for} bytes")
    try:
        line = _decode_fields(text)
    except _NOT_JSON as error:
        return refused("invalid_json_line", f"it is not a JSON object: {error}")
    if not isinstance(line.custom_id, str) or not line.custom_id:
        return refused("missing_required_parameter", "custom_id must be a text", "custom_id")
    custom_id = line.custom_id
    if line.method != "POST":
        return refused("invalid_method", f"method={_shown(line.method)} must be POST", "method")
    if line.url not in URLS:
        message = f"url={_shown(line.url)} must be one of {', '.join(URLS)}"
        return refused("invalid_url", message, "url")
    body = bytes(line.body)
    if not body:
        return refused("missing_required_parameter", "body is missing", "body")
    try:
        streams = _decode_stream(body).stream is True
    except _NOT_JSON:
        streams = False  # the route refuses the body, and says why
    if streams:
        return refused("invalid_request", "the answers of a batch are not streamed", "body.stream")
    return InputLine(number, id, custom_id, line.url, body)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def check_input(lines: Iterable[InputLine]) -> set[str]:
    """Returns the ids of all lines. Raises ConfigError if two lines have the same `custom_id`,
    because nobody could match their answers to them."""
    first: dict[str, int] = {}
    ids = set()
    for line in lines:
        ids.add(line.id)
        if line.custom_id is None:
            continue
        if (number := first.setdefault(line.custom_id, line.number)) != line.number:
            raise ConfigError(
                f"line {line.number} of the input has the custom_id={_shown(line.custom_id)} of "
                f"line {number}; give each line its own"
            )
    return ids


class EarlierOutput(NamedTuple):
    """The lines that an earlier run has written."""

    ids: set[str]
    """Their ids."""
    failed: int
    """The number of lines with an error, or with another status than 200."""
    size_bytes: int
    """The size of the complete lines. A killed run may have left a part of one after them."""


def read_output(file: Iterable[bytes], ids: set[str], name: str) -> EarlierOutput:
    """Returns the lines of an output file. Raises ConfigError if it is not the output of the input
    with these ids."""
    known: set[str] = set()
    failed = size_bytes = 0
    for number, raw in enumerate(file, 1):
        if not raw.endswith(b"\n"):
            break
        size_bytes += len(raw)
        try:
            line = msgspec.json.decode(raw, type=OutputLine)
        except _NOT_JSON:
            raise ConfigError(
                f"line {number} of {name} is not a line of a batch's output; name another file"
            ) from None
        if line.id not in ids:
            raise ConfigError(
                f"line {number} of {name} (custom_id={_shown(line.custom_id)}) answers no line of "
                "the input, which has changed since, or is another one; name another file"
            )
        known.add(line.id)
        failed += line.failed
    return EarlierOutput(known, failed, size_bytes)
