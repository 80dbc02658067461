"""Schemas of the tools of a request, read before their calls get a grammar. Errors name the
tool."""

from __future__ import annotations

import time

import msgspec

from swell.cluster.text.json_grammar.schema_keywords import SchemaKeywords
from swell.cluster.text.json_grammar.schema_nodes import SchemaError
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.grammar import parameters_of
from swell.cluster.text.structured_output import MAX_SEARCH_S, compile_schema


def cleaned_tool(tool: Tool, keywords: SchemaKeywords) -> Tool:
    """The same tool, whose parameters have only keywords that a grammar follows. ValueError for
    others."""
    if not tool.parameters:
        return tool
    try:
        cleaned = keywords.clean(tool.parameters, f"tools[{tool.name}]")
    except SchemaError as error:
        raise ValueError(f"schema of tool {tool.name!r} {error}") from None
    return msgspec.structs.replace(tool, parameters=cleaned or {"type": "object"})


def check_each_tool(tools: list[Tool]) -> None:
    """Raise BadRequest for the first tool whose schema alone makes no grammar."""
    end_s = time.monotonic() + MAX_SEARCH_S
    for tool in tools:
        if time.monotonic() > end_s:
            return
        compile_schema(parameters_of(tool), f"tools: schema of tool {tool.name!r}", "tools")
