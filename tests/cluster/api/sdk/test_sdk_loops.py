"""The loops of SDK users over HTTP: the SDK parses an answer, dumps it, and sends it back with the
next question."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.cluster.api.responses.responses_server import CALL, ResponsesServer
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

USER = {"role": "user", "content": "the quick"}


class Point(BaseModel):
    """The arguments of the tool call that the server's engine writes."""

    at: int


class look(Point):  # the class name is the tool's name
    pass


def run(folder: Path, text: str, work: Callable[[ResponsesServer], Awaitable[None]]) -> None:
    async def serve() -> None:
        async with ResponsesServer(folder, text).open() as server:
            await work(server)

    asyncio.run(serve())


def test_a_parsed_answer_with_a_call_is_accepted_as_chat_history(tmp_path: Path) -> None:
    async def work(server: ResponsesServer) -> None:
        tool = {**openai.pydantic_function_tool(look), "returns": {"type": "string"}}
        first = await server.client.chat.completions.parse(
            model="fake", messages=[USER], tools=[tool], tool_choice="auto"
        )
        message = first.choices[0].message
        (call,) = message.tool_calls or ()
        assert call.function.parsed_arguments == look(at=3)
        for dumped in (message.model_dump(), message.to_dict(), message):
            second = await server.client.chat.completions.parse(
                model="fake",
                messages=[USER, dumped, {"role": "tool", "tool_call_id": call.id, "content": "9"}],
                tools=[tool],
            )
            assert second.choices[0].message.tool_calls
        name = "swell_ignored_fields_total"
        assert await server.cluster.metric(name + '{field="parsed_arguments"}') >= 1
        assert await server.cluster.metric(name + '{field="returns"}') >= 4

    run(tmp_path, CALL, work)


def test_a_parsed_form_is_accepted_as_chat_history(tmp_path: Path) -> None:
    async def work(server: ResponsesServer) -> None:
        first = await server.client.chat.completions.parse(
            model="fake", messages=[USER], response_format=Point
        )
        message = first.choices[0].message
        assert message.parsed == Point(at=3)
        await server.client.chat.completions.parse(
            model="fake", messages=[USER, message.model_dump(), USER], response_format=Point
        )
        assert '{"at": 3}' in server.prompts[-1]

    run(tmp_path, '{"at": 3}', work)


def test_parsed_items_are_accepted_as_responses_input(tmp_path: Path) -> None:
    async def work(server: ResponsesServer) -> None:
        tool = openai.pydantic_function_tool(look)["function"]
        payload: dict[str, Any] = {"model": "fake", "tools": [{**tool, "type": "function"}]}
        first = await server.client.responses.parse(input="the quick", **payload)
        dumped = [item.model_dump() for item in first.output]
        call = next(item for item in dumped if item["type"] == "function_call")
        assert call["parsed_arguments"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "9"}
        second = await server.client.responses.parse(input=[USER, *dumped, result], **payload)
        assert second.status == "completed"

    run(tmp_path, CALL, work)


def test_a_parsed_form_is_accepted_as_responses_input(tmp_path: Path) -> None:
    async def work(server: ResponsesServer) -> None:
        first = await server.client.responses.parse(
            model="fake", input="the quick", text_format=Point
        )
        assert first.output_parsed == Point(at=3)
        dumped = [item.model_dump() for item in first.output]
        await server.client.responses.parse(model="fake", input=[USER, *dumped, USER])
        assert '{"at": 3}' in server.prompts[-1]

    run(tmp_path, '{"at": 3}', work)


def test_a_dumped_message_is_accepted_by_the_messages_api(tmp_path: Path) -> None:
    async def work(server: ResponsesServer) -> None:
        url = str(server.cluster.client.base_url)
        tools: Any = [{"name": "look", "input_schema": {"type": "object"}, "returns": {}}]
        async with anthropic.AsyncAnthropic(
            base_url=url, api_key="k", timeout=HANG_S, max_retries=0
        ) as client:
            payload: dict[str, Any] = {"model": "fake", "max_tokens": 99, "tools": tools}
            question: Any = USER
            first = await client.messages.create(messages=[question], **payload)
            whole: Any = first.model_dump()
            call = next(block for block in first.content if block.type == "tool_use")
            result: Any = {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "9"}],
            }
            second = await client.messages.create(messages=[question, whole, result], **payload)
            assert second.stop_reason == "tool_use"

    run(tmp_path, CALL, work)
