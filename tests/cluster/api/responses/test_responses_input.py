"""Requests of `/v1/responses`: all forms of an item mean the same, unsupported fields are refused
by name, and the conversation reaches the chat template turn by turn."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseItemList, ResponseOutputItem
from pydantic import TypeAdapter
from starlette.datastructures import Headers

from swell.cluster.api.request_context import detached_context
from swell.cluster.api.responses import items as api
from swell.cluster.api.responses.background import ROUTE, make_job
from swell.cluster.api.responses.convert import chat_messages, chat_request, name_of
from swell.cluster.api.responses.input_items import read_input
from swell.cluster.api.responses.protocol import ResponsesRequest
from swell.cluster.api.responses.response import begin_response, item_list
from swell.cluster.api.store.response_store import Job
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.schema.chat_messages import ChatMessage, NamedToolChoice, call_rules
from swell.cluster.text.schema.decode import decode

pytestmark = pytest.mark.slow


def read(**body: Any) -> ResponsesRequest:
    payload = {"model": "m", "input": "hi", **body}
    return decode(json.dumps(payload).encode(), ResponsesRequest)


def items(*plain: Any) -> list[dict[str, Any]]:
    """Returns the parsed items of an input, without their generated ids."""
    found = read_input([msgspec.Raw(msgspec.json.encode(item)) for item in plain])
    plain: list[dict[str, Any]] = msgspec.to_builtins(found)
    return [{k: v for k, v in item.items() if k != "id"} for item in plain]


HELLO = {
    "type": "message",
    "role": "user",
    "status": "completed",
    "content": [{"type": "input_text", "text": "hello"}],
}


@pytest.mark.parametrize(
    "form",
    [
        {"role": "user", "content": "hello"},
        {"type": None, "role": "user", "content": "hello", "phase": None},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {**HELLO, "id": "msg_1"},
    ],
)
def test_all_forms_of_a_message_are_one_item(form: dict[str, Any]) -> None:
    assert items(form) == [HELLO]


def test_a_text_is_a_message_of_the_user() -> None:
    (item,) = read_input("hello")
    assert {**msgspec.to_builtins(item), "id": ""} == {**HELLO, "id": ""}


def test_a_message_of_the_assistant_is_output() -> None:
    (item,) = items({"role": "assistant", "content": "hello"})
    assert item["content"] == [
        {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    ]


OUTPUT: list[api.OutputItem] = [
    api.ReasoningItem(id="rs_1", content=[api.ReasoningText(text="hm")]),
    api.MessageItem(id="msg_1", role="assistant", content=[api.OutputText(text="yes")]),
    api.FunctionCallItem(id="fc_1", call_id="call_1", name="look", arguments='{"at": 1}'),
]


def test_items_of_an_answer_may_be_sent_back() -> None:
    """Items can be sent as received, or as the client's own types serialize them, with all
    nulls."""
    plain = msgspec.to_builtins(OUTPUT)
    adapter: TypeAdapter[Any] = TypeAdapter(list[ResponseOutputItem])
    dumped = adapter.dump_python(adapter.validate_python(plain), mode="json", by_alias=True)
    for form in (plain, dumped):
        again = read_input([msgspec.Raw(msgspec.json.encode(item)) for item in form])
        assert again == OUTPUT


def test_reasoning_that_another_server_encrypted_is_ignored() -> None:
    """Only the server that encrypted the reasoning can read it. The rest of the history is
    valid."""
    empty = {"type": "reasoning", "id": "rs_1", "summary": []}
    said = {"role": "assistant", "content": "yes"}
    (_, message) = read(input=[{**empty, "encrypted_content": "gAAA"}, said]).items()
    assert message == msgspec.structs.replace(read(input=[said]).items()[0], id=message.id)
    (turn,) = chat_messages(read(input=[{**empty, "encrypted_content": "gAAA"}, said]).items())
    assert (turn.text, turn.thoughts) == ("yes", None)


@pytest.mark.parametrize(
    ("payload", "param", "says"),
    [
        ({"input": []}, "input", "at least one"),
        ({"input": [3]}, "input[0]", "must be an object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "king"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input[0].content[0].type",
            "input_image",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
            "input[0].arguments",
            "missing",
        ),
        ({"input": [{"role": "user", "kontent": "x"}]}, "input[0].content", "missing"),
        (
            {"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}]},
            "input[0].call_id",
            "empty",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "", "arguments": ""}]},
            "input[0].name",
            "empty",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "", "output": ""}]},
            "input[0].call_id",
            "empty",
        ),
    ],
)
def test_a_wrong_item_is_named(payload: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**payload).items()
    assert caught.value.param == param
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({"tools": [{"type": "web_search", "search_context_size": "low"}]}, "tools[0].type"),
        ({"tools": [{"vector_store_ids": [], "type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"background": True, "store": False}, "store"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"max_tokens": 3}, "max_tokens"),
    ],
)
def test_unsupported_fields_are_refused_by_name(payload: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**payload)
    assert caught.value.param == param


def test_fields_without_effect_are_accepted() -> None:
    read(
        truncation="disabled",
        text={"format": {"type": "text"}, "verbosity": "medium"},
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        user="u",
        store=False,
        max_tool_calls=None,
        tools=[],
    )


# ---------------------------------------------------------------- as a chat


def chat_of(*plain: Any, **body: Any) -> Any:
    request = read(input=list(plain), **body)
    return chat_request(request, request.items())


def test_a_turn_of_the_assistant_is_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
    chat = chat_of(
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "let me look"},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "two"}],
        },
        {"role": "assistant", "content": "done"},
        instructions="be brief",
    )
    roles = [message.role for message in chat.messages]
    assert roles == ["system", "developer", "user", "assistant", "tool", "tool", "assistant"]
    turn = chat.messages[3]
    assert (turn.reasoning_content, turn.text) == ("hm", "let me look")
    assert [call.id for call in turn.tool_calls] == ["c1", "c2"]
    assert [(m.tool_call_id, m.text) for m in chat.messages[4:6]] == [("c1", "one"), ("c2", "two")]


texts = st.sampled_from(["", "a", "b"])
some_items = st.lists(
    st.one_of(
        st.builds(
            lambda role, text: api.MessageItem(
                id="", role=role, content=[api.InputText(text=text)]
            ),
            st.sampled_from(["user", "system", "assistant"]),
            texts,
        ),
        st.builds(
            lambda text: api.ReasoningItem(id="", content=[api.ReasoningText(text=text)]), texts
        ),
        st.builds(
            lambda id: api.FunctionCallItem(id="", call_id=id, name="f", arguments="{}"), texts
        ),
        st.builds(
            lambda id, text: api.FunctionCallOutputItem(id="", call_id=id, output=text),
            texts,
            texts,
        ),
    ),
    max_size=12,
)


def pieces_of(message: ChatMessage) -> list[tuple[str, str]]:
    """Returns the parts of a message in the order in which templates write them."""
    pieces = [("thinks", line) for line in (message.reasoning_content or "").split("\n")]
    pieces = pieces if message.reasoning_content is not None else []
    if message.content is not None:
        pieces.append((message.tool_call_id or message.role, message.text))
    return pieces + [("calls", call.id) for call in message.tool_calls or ()]


@settings(deadline=None)
@given(some_items)
def test_nothing_is_lost_or_moved_on_the_way_to_the_template(conversation: list[api.Item]) -> None:
    """In addition, no two adjacent assistant messages could be merged into one."""
    expected = []
    for item in conversation:
        match item:
            case api.MessageItem():
                expected.append((item.role, item.content[0].text))  # type: ignore[union-attr]
            case api.ReasoningItem():
                if item.content[0].text:
                    expected.append(("thinks", item.content[0].text))
            case api.FunctionCallItem():
                expected.append(("calls", item.call_id))
            case api.FunctionCallOutputItem():
                expected.append((item.call_id or "tool", str(item.output)))
    messages = chat_messages(conversation)
    assert [piece for message in messages for piece in pieces_of(message)] == expected
    for one, other in itertools.pairwise(messages):
        if one.role == other.role == "assistant":
            has_reasoning, has_text = other.reasoning_content is not None, other.content is not None
            assert (has_reasoning or has_text) and (one.tool_calls or one.content is not None)


def test_request_fields_reach_the_chat_request() -> None:
    schema = {"type": "object", "properties": {}}
    chat = chat_of(
        {"role": "user", "content": "hi"},
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        seed=9,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        reasoning={"effort": "high"},
        parallel_tool_calls=False,
        cache_salt="s",
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
    )
    params = chat.sampling_params()
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 0.25)
    assert (params.top_k, params.seed, params.logprobs) == (4, 9, 2)
    assert (chat.reasoning_effort, chat.parallel_tool_calls, chat.cache_salt) == (
        "high",
        False,
        "s",
    )
    (tool,) = chat.tools
    assert (tool.function.name, tool.function.parameters, tool.function.strict) == (
        "f",
        schema,
        True,
    )
    assert isinstance(chat.tool_choice, NamedToolChoice)


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        {"type": "function", "name": "f"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "f"}],
        },
    ],
)
def test_a_response_repeats_the_choice_among_tools(choice: Any) -> None:
    body = read(tools=[{"type": "function", "name": "f"}], tool_choice=choice)
    assert begin_response(body, "m", store=False).tool_choice == choice
    assert begin_response(read(), "m", store=False).tool_choice == "auto"


def test_a_background_job_has_the_request_without_its_input() -> None:
    begun = {"x-request-id": "r", "cookie": "c"}
    job = asyncio.run(_job_of(Headers(begun)))
    assert json.loads(job.body) == {"seed": 3, "input": []}
    assert job.headers == [(b"x-request-id", b"r")]


async def _job_of(headers: Headers) -> Job:
    return make_job(detached_context(headers, ROUTE, ""), read(model=None, seed=3), None)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_and_a_response_format_in_one_request(mode: str) -> None:
    names = [{"type": "function", "name": name} for name in ("f", "g")]
    fields = {
        "tools": names,
        "text": {"format": {"type": "json_object"}},
        "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": names[:1]},
    }
    chat = chat_of({"role": "user", "content": "hi"}, **fields)
    assert [tool.function.name for tool in chat.tools] == ["f", "g"]
    rules = call_rules(chat.tool_choice)
    assert (rules.names, rules.required) == ({"f"}, mode == "required")
    assert chat.form() is not None
    fields["tool_choice"]["tools"] = [{"type": "function", "name": "evil"}]
    with pytest.raises(BadRequest, match="names 'evil'"):
        chat_of({"role": "user", "content": "hi"}, **fields)
    fields["tool_choice"] = {"type": "allowed_tools", "mode": "any", "tools": []}
    with pytest.raises(BadRequest, match="mode"):
        chat_of({"role": "user", "content": "hi"}, **fields)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "name": "n", "schema": {"type": "array"}}, {"json": {}}),
    ],
)
def test_the_format_of_the_text(form: dict[str, Any], expected: dict[str, Any] | None) -> None:
    wanted = chat_of({"role": "user", "content": "hi"}, text={"format": form}).form()
    if expected is None:
        assert wanted is None
    else:
        (name,) = expected
        assert getattr(wanted, name) == form.get("schema", True)


def test_a_stored_call_that_was_cut_off_is_accepted() -> None:
    call = api.FunctionCallItem(id="", call_id="c9", name="f", arguments='{"x": ')
    request = read()
    chat = chat_request(request, request.items(), [call])
    assert chat.messages[0].tool_calls[0].function.arguments == '{"x": '


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("messages", "input"),
        ("messages[3].content", "input"),
        ("max_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("tools[2].function.name", "tools[2].name"),
        ("tool_choice", "tool_choice"),
        ("temperature", "temperature"),
    ],
)
def test_errors_name_the_fields_of_this_api(theirs: str, ours: str) -> None:
    error = BadRequest(f"{theirs}=3 is wrong", theirs, "code").renamed(name_of)
    assert (error.message, error.param, error.code) == (f"{ours}=3 is wrong", ours, "code")


def test_errors_between_tools_name_the_fields_of_this_api() -> None:
    twice = [{"type": "function", "name": "f"}] * 2
    with pytest.raises(BadRequest) as caught:
        chat_of({"role": "user", "content": "hi"}, tools=twice)
    assert caught.value.param == "tools[1].name"
    assert "function" not in caught.value.message


# ---------------------------------------------------------------- pages of a response's input


@given(
    st.integers(0, 12),
    st.integers(1, 5),
    st.booleans(),
)
def test_pages_follow_each_other(count: int, limit: int, newest_first: bool) -> None:
    """Read page by page, the input is whole and in order."""
    all_items: list[api.Item] = [
        api.MessageItem(id=f"msg_{n}", role="user", content=[api.InputText(text="x")])
        for n in range(count)
    ]
    found: list[str] = []
    after = None
    for _ in range(count + 1):
        page = item_list(all_items, limit=limit, after=after, newest_first=newest_first)
        assert len(page.data) <= limit
        if page.data:
            ResponseItemList.model_validate(msgspec.to_builtins(page), strict=True)
            assert (page.first_id, page.last_id) == (page.data[0].id, page.data[-1].id)
        found += [item.id for item in page.data]
        if not page.has_more:
            break
        after = page.last_id
    else:
        pytest.fail("there is always one more page")
    expected = [item.id for item in all_items]
    assert found == (expected[::-1] if newest_first else expected)


def test_a_response_repeats_the_request() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}}
    body = read(tools=[tool], metadata={"a": "b"}, temperature=0.5, instructions="x")
    response = msgspec.json.decode(msgspec.json.encode(begin_response(body, "m", store=True)))
    assert response["tools"] == [{**tool, "description": None, "strict": None}]
    assert (response["temperature"], response["top_p"], response["store"]) == (0.5, 1.0, True)
    assert (response["metadata"], response["instructions"]) == ({"a": "b"}, "x")
    assert response["id"] != begin_response(body, "m", store=True).id
