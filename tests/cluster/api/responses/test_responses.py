"""`/v1/responses` as OpenAI's client uses it: answers, streams, conversations, stored responses."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseItemList

from swell.cluster.api.responses import response_client
from swell.cluster.api.store.response_store import Store
from tests.cluster.api.responses.responses_server import (
    CALL,
    LOOK,
    TOKENIZER,
    ResponsesServer,
    checked,
    wait_until,
)
from tests.cluster.fake_cluster import until

pytestmark = pytest.mark.slow


def test_a_response_is_created_stored_and_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, f"Hello. {CALL}").open() as server:
            responses = server.client.responses
            answer = checked(await server.create(tools=[LOOK], metadata={"a": "b"}))
            assert answer.status == "completed" and answer.output_text == "Hello. "
            assert json.loads(answer.output[1].arguments) == {"at": 3}
            assert answer.usage.total_tokens == answer.usage.input_tokens + len(
                server.cluster._script or []
            )
            assert len(server.response_store.requests) == 1
            again = await responses.retrieve(answer.id)
            assert again.model_dump() == answer.model_dump()
            await responses.delete(answer.id)
            with pytest.raises(openai.NotFoundError) as caught:
                await responses.retrieve(answer.id)
            assert caught.value.code == "response_not_found"

    asyncio.run(scenario())


@pytest.mark.parametrize("store", [True, False])
def test_a_stream_ends_with_the_stored_response(tmp_path: Path, store: bool) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the quick brown fox").open() as server:
            stream = server.client.responses.stream
            async with stream(model="fake", input="hello", store=store) as events:
                kinds = [event.type async for event in events]
                answer = checked(await events.get_final_response())
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert kinds[-1] == "response.completed"
            assert answer.output_text == "the quick brown fox"
            assert len(server.response_store.requests) == int(store)
            if store:
                again = await server.client.responses.retrieve(answer.id)
                assert again.output_text == answer.output_text

    asyncio.run(scenario())


def test_a_disconnected_stream_leaks_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the quick brown fox").open(steps=1) as server:
            async with await server.create(stream=True) as events:
                async for event in events:
                    if event.type == "response.output_text.delta":
                        break
            await until(lambda: server.engine.aborted)
            assert not server.engine.requests and server.response_store.requests == []

    asyncio.run(scenario())


def test_a_conversation_continues(tmp_path: Path) -> None:
    """The conversation is read from the stored responses. The prompt is the same as if the client
    had sent all of it."""

    async def scenario() -> None:
        async with ResponsesServer(tmp_path, f"I look. {CALL}").open() as server:
            first = await server.create(tools=[LOOK], instructions="be kind")
            result = {
                "type": "function_call_output",
                "call_id": first.output[1].call_id,
                "output": "a fox",
            }
            second = await server.create(
                tools=[LOOK], input=[result], previous_response_id=first.id, temperature=0
            )
            by_hand = [
                {"role": "user", "content": "hello"},
                *[item.model_dump(mode="json") for item in first.output],
                result,
            ]
            await server.create(tools=[LOOK], input=by_hand, store=False)
            assert "be kind" in server.prompts[0] and "be kind" not in server.prompts[1]
            assert server.prompts[1] == server.prompts[2]
            assert server.prompts[1].endswith("a fox<|im_end|>\n<|im_start|>assistant\n")

            given = server.client.responses.input_items
            page = await given.list(second.id, limit=2, order="asc")
            kinds = [item.type async for item in page]
            assert kinds == ["message", "message", "function_call", "function_call_output"]
            newest = await given.list(second.id)
            plain = json.loads(newest.model_dump_json(by_alias=True, exclude_unset=True))
            ResponseItemList.model_validate(plain)
            assert newest.data[0].type == "function_call_output"

            await server.client.responses.delete(first.id)
            third = await server.create(previous_response_id=second.id)
            assert third.previous_response_id == second.id
            assert server.prompts[3].startswith(server.prompts[1].removesuffix("assistant\n"))

    asyncio.run(scenario())


def test_reasoning_is_an_item_and_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"serve.reasoning_parser": "think"}
        async with ResponsesServer(
            tmp_path, "<think>the fox</think>yes", **settings
        ).open() as server:
            answer = checked(await server.create())
            assert [item.type for item in answer.output] == ["reasoning", "message"]
            assert answer.output[0].content[0].text == "the fox"
            count = len(TOKENIZER.encode("the fox", add_special_tokens=False))
            assert answer.usage.output_tokens_details.reasoning_tokens == count

    asyncio.run(scenario())


def test_a_truncated_answer_is_incomplete(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the quick brown fox").open() as server:
            answer = checked(await server.create(max_output_tokens=2))
            assert answer.status == "incomplete"
            assert answer.incomplete_details.reason == "max_output_tokens"
            assert answer.output[0].status == "incomplete"
            kinds = [
                event.type async for event in await server.create(max_output_tokens=2, stream=True)
            ]
            assert kinds[-1] == "response.incomplete"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("payload", "param", "code"),
    [
        ({"max_output_tokens": 10**6}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"model": "other"}, "model", "model_not_found"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_value"),
        ({"tool_choice": "required"}, "tool_choice", None),
    ],
)
def test_errors_name_field_and_value(
    tmp_path: Path, payload: dict[str, Any], param: str, code: str | None
) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "x").open() as server:
            with pytest.raises(openai.APIStatusError) as caught:
                await server.create(**payload)
            assert caught.value.status_code == (404 if code == "model_not_found" else 400)
            error: Any = caught.value.body
            assert (error["param"], error["code"]) == (param, code)
            assert "messages" not in error["message"] and "max_tokens" not in error["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/responses/resp_x", 404),
        ("DELETE", "/v1/responses/resp_x", 404),
        ("POST", "/v1/responses/resp_x/cancel", 404),
        ("GET", "/v1/responses/resp_x/input_items", 404),
        ("GET", "/v1/responses/resp_x?stream=true", 400),
        ("GET", "/v1/responses/resp_x?starting_after=3", 400),
        ("GET", "/v1/responses/resp_x/input_items?limit=0", 400),
        ("GET", "/v1/responses/resp_x/input_items?limit=101", 400),
        ("GET", "/v1/responses/resp_x/input_items?order=up", 400),
        ("PUT", "/v1/responses/resp_x", 405),
    ],
)
def test_unknown_responses_are_404(tmp_path: Path, method: str, path: str, status: int) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "x").open() as server:
            reply = await server.cluster.client.request(method, path)
            assert reply.status_code == status
            assert reply.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_response_is_returned_although_the_store_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer says that it is not stored. Requests for stored responses are answered with an
    error: the store cannot be reached."""
    monkeypatch.setattr(response_client, "_UNAVAILABLE_S", 600.0)

    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the fox").open() as server:
            kept = await server.create()
            server.response_store.away = True
            lost = [await server.create() for _ in range(3)]
            assert [answer.output_text for answer in lost] == ["the fox"] * 3
            assert [answer.store for answer in (kept, *lost)] == [True, False, False, False]
            assert len(server.response_store.missed) == 1, (
                "a store that does not answer is not waited for every time"
            )
            for call in (
                server.client.responses.retrieve(kept.id),
                server.create(previous_response_id=kept.id),
                server.create(background=True),
            ):
                with pytest.raises(openai.InternalServerError) as caught:
                    await call
                assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")

    asyncio.run(scenario())


def test_a_server_without_a_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(
            tmp_path, "the fox", **{"serve.stored_responses": 0}
        ).open() as server:
            answer = await server.create()
            assert answer.store is False and server.response_store.requests == []
            for payload in ({"store": True}, {"background": True}):
                with pytest.raises(openai.BadRequestError, match="stored_responses=0"):
                    await server.create(**payload)

    asyncio.run(scenario())


def test_a_key_is_required(tmp_path: Path) -> None:
    async def scenario() -> None:
        keys = tmp_path / "keys"
        keys.write_text("k\n")
        async with ResponsesServer(
            tmp_path, "x", **{"serve.api_keys_file": str(keys)}
        ).open() as server:
            answer = await server.create()
            intruder = server.client.with_options(api_key="other").responses
            for call in (
                intruder.retrieve(answer.id),
                intruder.delete(answer.id),
                intruder.cancel(answer.id),
                intruder.input_items.list(answer.id),
                intruder.create(model="fake", input="x"),
            ):
                with pytest.raises(openai.AuthenticationError):
                    await call
            assert (await server.client.responses.retrieve(answer.id)).id == answer.id

    asyncio.run(scenario())


def keyed(folder: Path) -> ResponsesServer:
    keys = folder / "keys"
    keys.write_text("k  # ours\nother\n")
    return ResponsesServer(folder, "the fox", **{"serve.api_keys_file": str(keys)})


@pytest.mark.parametrize("background", [False, True])
def test_a_key_cannot_read_the_responses_of_another_key(tmp_path: Path, background: bool) -> None:
    """With another key, every ingress and route answers as if the response did not exist."""

    async def scenario() -> None:
        async with keyed(tmp_path).open() as server, server.second_ingress() as (_, near, _ingress):
            other = near.with_options(api_key="other")
            ours = await server.create(background=background)
            await wait_until(
                lambda: near.responses.retrieve(ours.id),
                lambda found: found.status == "completed",
            )
            for call in (
                other.responses.retrieve,
                other.responses.delete,
                other.responses.cancel,
                other.responses.input_items.list,
            ):
                with pytest.raises(openai.NotFoundError) as caught:
                    await call(ours.id)
                with pytest.raises(openai.NotFoundError) as unknown:
                    await call("resp_0")
                assert caught.value.code == unknown.value.code == "response_not_found"
                message = caught.value.message.replace(ours.id, "resp_0")
                assert message == unknown.value.message
            with pytest.raises(openai.BadRequestError) as refused:
                await other.responses.create(
                    model="fake", input="x", previous_response_id=ours.id, store=False
                )
            assert refused.value.code == "previous_response_not_found"
            again = await near.responses.create(
                model="fake", input="x", previous_response_id=ours.id
            )
            assert again.output_text == "the fox"
            page = await near.responses.input_items.list(again.id)
            assert [item.type for item in page.data] == ["message"] * 3
            await near.responses.delete(ours.id)

    asyncio.run(scenario())


def test_the_store_contains_no_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with keyed(tmp_path).open() as server:
            ours = await server.create()
            (stored,) = server.response_store.of(Store)
            owner, _, id = stored.id.partition("/")
            assert id == ours.id and owner == hashlib.sha256(b"k").hexdigest()
            by_header = {"x-api-key": "k", "authorization": "Basic eA=="}
            same = await server.client.responses.retrieve(ours.id, extra_headers=by_header)
            assert same.id == ours.id

    asyncio.run(scenario())
