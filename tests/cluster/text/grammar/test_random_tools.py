"""Calls of tools with random schemas, over tokenizers of each kind: the arguments that the parser
reads fit the schema, and a stream has the same calls as the whole answer."""

from __future__ import annotations

import json
import os

import jsonschema
import pytest

from swell.cluster.text.errors import BadRequest
from tests.cluster.text.grammar.grammar_samples import WITH_TOOLS, request, walk
from tests.support.random_schemas import random_schema

pytestmark = pytest.mark.slow

SCHEMAS = int(os.environ.get("SWELL_RANDOM_SCHEMAS", "12"))
FIRST = int(os.environ.get("SWELL_RANDOM_SCHEMAS_FIRST", "0"))
FORCED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_arguments_fit_a_random_schema(name: str) -> None:
    """A schema that a format of calls cannot enforce is refused by the tool's name."""
    read = 0
    for seed in range(FIRST, FIRST + SCHEMAS):
        schema = random_schema(seed)
        tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
        body = request(tools=[tool], tool_choice=FORCED, reasoning_effort="none")
        answer, refusal = None, "look"
        try:
            answer = walk(name, body, seed, max_tokens=400)
        except BadRequest as error:
            refusal = error.message
        assert "look" in refusal, (seed, refusal)
        if answer is None or not answer.ended:
            continue
        read += 1
        (call,) = answer.read().tool_calls
        (streamed,) = answer.read(stream=True).tool_calls
        assert (call.name, call.arguments) == (streamed.name, streamed.arguments)
        found = [*jsonschema.Draft202012Validator(schema).iter_errors(json.loads(call.arguments))]
        assert not found, (seed, call.arguments, found[0].message)
    assert SCHEMAS < 12 or read


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_number_of_the_greatest_length_ends(name: str) -> None:
    """In some formats only a special token follows a number."""
    schema = {"type": "object", "properties": {"v": {"multipleOf": 3, "type": "number"}}}
    schema |= {"required": ["v"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    body = request(tools=[tool], tool_choice=FORCED, reasoning_effort="none")
    for seed in range(6):
        (call,) = walk(name, body, seed).message.tool_calls
        jsonschema.validate(json.loads(call.arguments), schema)
