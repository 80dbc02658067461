"""Converts ids of tool calls. Anthropic's ids are `toolu_` and letters, digits, `_` or `-`; the ids
of a model's format look as its chat template requires (Mistral's are nine letters and digits,
Kimi's contain the function name). Therefore an Anthropic id is the model's id with a prefix, in
hexadecimal if it has other characters. An id that a client sends back reaches the template exactly
as the parser returned it."""

from __future__ import annotations

import re

_PREFIX = "toolu_"
_CODED = "toolu_x_"
_PLAIN = re.compile(r"(?!x_)[a-zA-Z0-9_-]+\Z")


def tool_use_id(call_id: str) -> str:
    if _PLAIN.match(call_id):
        return _PREFIX + call_id
    return _CODED + call_id.encode().hex()


def call_id(tool_use_id: str) -> str:
    """Returns the model's id. Ids without the prefix, from other servers, are not changed."""
    if tool_use_id.startswith(_CODED):
        try:
            return bytes.fromhex(tool_use_id.removeprefix(_CODED)).decode()
        except ValueError:
            pass
    return tool_use_id.removeprefix(_PREFIX) or tool_use_id
