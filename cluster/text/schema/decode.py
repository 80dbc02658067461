"""Decodes bytes to a typed request, or raises a `BadRequest` that names field, value and limit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.exact_numbers import decode_json, read_float
from swell.cluster.text.json_types import JsonValue
from swell.cluster.text.params.field_path import (
    MAX_PATH_CHARS,
    Key,
    join_path,
    rename_roots,
    split_path,
)
from swell.cluster.text.schema.json_size import check_size
from swell.cluster.text.schema.request_body import RequestBody
from swell.cluster.text.schema.unknown_fields import StrippedFields, UnknownFields
from swell.configs.error_text import did_you_mean, shown

Request = TypeVar("Request", bound=RequestBody)

MAX_EXPLAINED_BYTES = 256 * 1024
"""Limit on the size of an invalid JSON body that is parsed again to explain its error. For a longer
one the error has only the position: more would take long."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Windows tools write it in front of UTF-8."""
_MAX_ERROR_CHARS = 1000
"""Limit on the length of msgspec's message: it may repeat the names of unknown fields."""


@cache
def _decoder(kind: type[RequestBody]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, float_hook=read_float)


_JSON_TYPE_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
}


_QUOTED = re.compile("`([^`]*)`")
_UNKNOWN = "Object contains unknown field"
_MISSING = "Object missing required field"


def decode(body: bytes, kind: type[Request]) -> Request:
    """Decodes and checks one request body. Raises only `BadRequest`."""
    return read(body, kind)[0]


def decode_part(body: bytes, kind: type[Request], path: str) -> Request:
    """Decodes the part of a request at `path`, which errors name."""
    try:
        return decode(body, kind)
    except BadRequest as error:
        raise error.within(path) from None


def read(
    body: bytes, kind: type[Request], unknown: UnknownFields = "refuse"
) -> tuple[Request, StrippedFields]:
    """Decodes a body like `decode`. Also returns what was left out of it; `unknown` is
    `serve.unknown_fields`."""
    body = body.removeprefix(_BYTE_ORDER_MARK)
    check_size(body)
    stripped = StrippedFields(unknown)
    try:
        return _request(body, kind, stripped), stripped
    except BadRequest as error:
        raise error.renamed(rename_roots(stripped.aliases)) from None


def _request(body: bytes, kind: type[Request], stripped: StrippedFields) -> Request:
    sent = body
    try:
        if kind.PARTS:  # the decoder does not check these by itself
            body = stripped.strip(body, kind)
        try:
            request: Request = _decoder(kind).decode(body)
        except msgspec.ValidationError as error:
            if not str(error).startswith(_UNKNOWN):
                raise
            body = stripped.strip(body, kind)
            request = _decoder(kind).decode(body)
        request.keep(sent)
    except msgspec.ValidationError as error:
        raise _explain_validation(error, body, kind) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _explain_syntax(error, body) from None
    request.check()
    return request


def _explain_syntax(error: Exception, body: bytes) -> BadRequest:
    """Returns the error for a body that is not JSON. Python's own parser accepts two things that
    are invalid JSON, NaN and lone surrogates, so it can distinguish them from plain syntax
    errors."""
    what, param = f"the body is not valid JSON: {error}", None
    constants: list[str] = []
    try:
        text = body.decode()
        if not body.strip():
            what = "the body is empty; a JSON object is expected"
        elif len(body) <= MAX_EXPLAINED_BYTES:
            keys = _find_surrogate(json.loads(text, parse_constant=constants.append))
            if constants:
                what = f"the body is not valid JSON: {constants[0]} is not a JSON number"
            elif keys is not None:
                param = join_path(keys)[:MAX_PATH_CHARS] or None
                what = (
                    f"{param or 'the body'} contains a lone surrogate (half of a \\uD800-\\uDFFF "
                    "pair), which is not valid Unicode"
                )
    except UnicodeDecodeError as flaw:
        what = f"the body is not UTF-8: {flaw.reason} at byte {flaw.start}"
    except (ValueError, RecursionError):
        pass  # plain syntax errors
    return BadRequest(what, param, "invalid_json")


def _find_surrogate(value: object) -> list[Key] | None:
    """Returns the path of the first string that cannot be encoded as UTF-8."""
    items: Iterable[tuple[Key, JsonValue]] = ()
    if isinstance(value, str):
        return None if _is_text(value) else []
    if isinstance(value, dict):
        if not all(map(_is_text, value)):
            return []
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        keys = _find_surrogate(item)
        if keys is not None:
            return [key, *keys]
    return None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_types(quoted: re.Match[str]) -> str:
    return " or ".join(_JSON_TYPE_NAMES.get(one, one) for one in quoted[1].split(" | "))


class _Rejection(NamedTuple):
    """The parts of msgspec's message, which is plain text."""

    rule: str
    """The rule, with the JSON names of types: `expected integer or null, got string`."""
    path: str
    """The path of the value; empty for the body itself."""
    name: str
    """The name that the message quotes: the missing or unknown field."""

    @classmethod
    def parse(cls, message: str) -> _Rejection:
        if len(message) > _MAX_ERROR_CHARS:
            half = _MAX_ERROR_CHARS // 2
            message = f"{message[:half]}...{message[-half:]}"
        rule, found, path = message.rpartition(" - at `")
        if not found:
            rule, path = message, ""
        name = rule[rule.find("`") + 1 : max(rule.rfind("`"), 0)]
        rule = _QUOTED.sub(_json_types, rule)
        path = path.rstrip("`").removeprefix("$").removeprefix(".")
        return cls(rule[:1].lower() + rule[1:], path, name)


def _explain_validation(
    error: msgspec.ValidationError, body: bytes, kind: type[RequestBody]
) -> BadRequest:
    """Returns the error for a body that fails validation. msgspec reports the rule and the path;
    the value is looked up in the body."""
    rule, path, name = _Rejection.parse(str(error))
    full = f"{path}.{name}" if path else name
    if str(error).startswith(_UNKNOWN):
        return BadRequest(_unknown_field(full, name, path, kind), full, "unknown_field")
    if str(error).startswith(_MISSING):
        return BadRequest(f"the required field {full!r} is missing", full, "missing_field")
    if not path:
        return BadRequest(f"the body is invalid: {rule}", None, "invalid_type")
    found, value = _lookup(body, path)
    head = f"{path}={shown(value)}" if found else path
    return BadRequest(f"{head}: {rule}", path, "invalid_type")


def _unknown_field(full: str, name: str, path: str, kind: type[RequestBody]) -> str:
    known = [] if path else list(kind.__struct_fields__)
    return f"the field {shown(full)} is unknown{did_you_mean(name, known)}"


def _lookup(body: bytes, path: str) -> tuple[bool, JsonValue]:
    """Returns whether there is a single value at `path`, and the value."""
    try:
        value = decode_json(body)
        for key in split_path(path):
            value = value[key]
    except (ValueError, LookupError, TypeError, RecursionError):
        return False, None
    return "[...]" not in path, value
