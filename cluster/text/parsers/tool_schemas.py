"""Prepares the schemas of a request's tools for grammars. Errors name the tool."""

from __future__ import annotations

import time

import msgspec

from swell.cluster.text.grammar.structured_output import MAX_SEARCH_S, compile_schema
from swell.cluster.text.json_grammar.schema_keywords import SchemaKeywords
from swell.cluster.text.json_grammar.schema_nodes import SchemaError
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.grammar import parameters_of


def cleaned_tool(tool: Tool, keywords: SchemaKeywords) -> Tool:
    """Returns the same tool with parameters in keywords that grammars support. Raises ValueError
    for others."""
    if not tool.parameters:
        return tool
    try:
        cleaned = keywords.clean(tool.parameters, f"tools[{tool.name}]")
    except SchemaError as error:
        raise ValueError(f"schema of tool {tool.name!r} {error}") from None
    return msgspec.structs.replace(tool, parameters=cleaned or {"type": "object"})


def check_each_tool(tools: list[Tool]) -> None:
    """Raises BadRequest for the first tool whose schema, by itself, does not compile."""
    end_s = time.monotonic() + MAX_SEARCH_S
    for tool in tools:
        if time.monotonic() > end_s:
            return
        compile_schema(parameters_of(tool), f"tools: schema of tool {tool.name!r}", "tools")
