"""Ids of calls: Anthropic's are `toolu_` and letters, digits, `_` or `-`; those of a model's format
look as its template wants them (Mistral's have nine letters and digits, Kimi's name the function).
So the one is the other with a prefix, and in hexadecimal where it has other characters: what comes
back in a conversation reaches the template as it left the parser."""

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
    """Ids without the prefix, from other servers, are not changed."""
    if tool_use_id.startswith(_CODED):
        try:
            return bytes.fromhex(tool_use_id.removeprefix(_CODED)).decode()
        except ValueError:
            pass
    return tool_use_id.removeprefix(_PREFIX) or tool_use_id
