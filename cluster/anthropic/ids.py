"""Ids of calls: Anthropic's begin with `toolu_`, those of a model's format look as its template
wants them (Mistral's have nine letters and digits). So the one is the other with a prefix: what
comes back in a conversation reaches the template as it left the parser."""

from __future__ import annotations

_PREFIX = "toolu_"


def tool_use_id(call_id: str) -> str:
    return _PREFIX + call_id


def call_id(tool_use_id: str) -> str:
    """Ids of other makers, without the prefix, are taken as they are."""
    return tool_use_id.removeprefix(_PREFIX) or tool_use_id
