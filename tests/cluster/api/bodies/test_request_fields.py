"""No field of a request is silently ignored: each field of every typed body is effective, is
refused unless its value is neutral, or stands in the table of
`docs/reference/fields-without-effect.md`, with the reason. So does each field of another server
(`cluster/text/schema/known_fields.py`). A field that no body has is refused in a request, and
ignored in a history.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.messages import blocks
from swell.cluster.api.messages.protocol import CountTokensRequest, MessagesRequest
from swell.cluster.api.openapi.operations import OPERATIONS
from swell.cluster.api.responses.input_items import FORMS, InputPart
from swell.cluster.api.responses.protocol import (
    AllowedToolsChoice,
    FunctionChoice,
    FunctionTool,
    ResponsesRequest,
)
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.sampling_params import RepetitionDetection, StructuredOutputs
from swell.cluster.text.schema.chat_messages import ContentPart, ToolDefinition
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.schema.known_fields import Ecosystem
from swell.cluster.text.schema.request_body import HistoryPart, RequestBody, not_served
from swell.engine.wire import RepetitionPattern
from tests.cluster.fake_cluster import FakeCluster, body
from tests.cluster.text import tokenizers_for_tests
from tests.support.paths import ROOT

DOCS = ROOT / "docs" / "reference" / "fields-without-effect.md"
HEADING = "## Fields"

UNTYPED = [FunctionTool, FunctionChoice, AllowedToolsChoice, InputPart, *FORMS.values()]
"""Parts of `/v1/responses` that are parsed after the body."""

TOKENS = (
    "temperature top_p top_k min_p seed min_tokens stop stop_token_ids ignore_eos presence_penalty "
    "frequency_penalty repetition_penalty logit_bias bad_words allowed_token_ids "
    "structured_outputs priority cache_salt data_parallel_rank guided_json guided_json_object "
    "guided_regex guided_choice guided_grammar json_schema regex ebnf "
)
ANSWER = (
    TOKENS + "model max_tokens include_stop_str_in_output skip_special_tokens n prompt_logprobs "
    "response_format stream stream_options stream_interval return_token_ids logprobs best_of echo "
    "return_tokens_as_token_ids add_special_tokens truncate_prompt_tokens truncation_side "
    "include_timings return_routed_experts repetition_detection "
)
CONVERSATION = (
    "model messages system tools tool_choice thinking output_config chat_template_kwargs "
)
POOLING = (
    "model truncate truncate_prompt_tokens truncation_side add_special_tokens priority cache_salt "
    "data_parallel_rank include_timings "
)
UNSERVED_BLOCK = "source title context citations content"
"""Fields of content blocks that are refused because their block type is refused."""

EFFECTIVE: dict[str, str] = {
    "CompletionRequest": ANSWER + "prompt prompt_embeds session_id session_chunk",
    "ChatCompletionRequest": ANSWER
    + "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls "
    "reasoning_effort thinking_token_budget add_generation_prompt continue_final_message "
    "chat_template chat_template_kwargs enable_thinking thinking reasoning include_reasoning "
    "documents",
    "ResponsesRequest": TOKENS
    + "model input instructions previous_response_id max_output_tokens tools tool_choice "
    "parallel_tool_calls text reasoning include top_logprobs stream stream_options store "
    "background chat_template_kwargs include_timings",
    "CountTokensRequest": CONVERSATION,
    "MessagesRequest": CONVERSATION
    + "max_tokens stop_sequences temperature top_p top_k stream seed priority cache_salt "
    "data_parallel_rank include_timings",
    "TokenizeRequest": "model prompt messages tools add_special_tokens add_generation_prompt "
    "continue_final_message chat_template chat_template_kwargs return_token_strs",
    "DetokenizeRequest": "model tokens",
    "CancelRequest": "request_id ids",
    "AbortRequest": "request_ids",
    "EmbeddingRequest": POOLING
    + "input encoding_format dimensions normalize prompt_name input_type",
    "ClassifyRequest": POOLING + "input use_activation",
    "ScoreRequest": POOLING + "text_1 text_2 queries documents use_activation",
    "RerankRequest": POOLING + "query documents top_n return_documents use_activation",
    "RerankDocument": "text",
    "ScaleRequest": "engines drain_timeout_s",
    "DrainRequest": "rank",
    "UpgradeRequest": "config",
    "WeightsRequest": "path",
    "SwitchRequest": "",
    "CreateSessionRequest": "",
    "SleepRequest": "level requests",
    "LoadAdapterRequest": "lora_name lora_path load_inplace",
    "UnloadAdapterRequest": "lora_name",
    # Parts of the bodies above.
    "StreamOptions": "include_usage continuous_usage_stats",
    "ResponseFormat": "type json_schema",
    "JsonSchemaFormat": "schema",
    "StructuredOutputs": "json json_object regex choice grammar",
    "RepetitionDetection": "max_pattern_size min_pattern_size min_count",
    "ChatMessage": "role content name tool_call_id tool_calls reasoning_content reasoning "
    "function_call",
    "ThinkingSwitch": "type",
    "ReasoningSwitch": "effort enabled",
    "ContentPart": "type text refusal",
    "MessageToolCall": "id type function",
    "FunctionCall": "name arguments",
    "ToolDefinition": "type function",
    "FunctionDefinition": "name description parameters strict",
    "NamedToolChoice": "type function allowed_tools",
    "AllowedTools": "mode tools",
    "AllowedTool": "type function",
    "AllowedToolsChoice": "type mode tools",
    "FunctionName": "name",
    "TextOptions": "format",
    "TextFormat": "type schema",
    "ReasoningOptions": "effort",
    "FunctionTool": "name description parameters strict",
    "FunctionChoice": "type name",
    "InputPart": "type text refusal",
    "openai.InputMessage": "type role content id",
    "InputFunctionCall": "type call_id name arguments id",
    "InputFunctionCallOutput": "type call_id output id",
    "InputReasoning": "type summary content id",
    "anthropic.InputMessage": "role content",
    "Tool": "name type description input_schema strict",
    "ToolChoice": "type name disable_parallel_tool_use",
    "Thinking": "type budget_tokens display",
    "OutputConfig": "effort format",
    "OutputFormat": "type schema",
    "TextBlock": "text",
    "ThinkingBlock": "thinking",
    "RedactedThinkingBlock": "",
    "ToolUseBlock": "id name input",
    "ToolResultBlock": "tool_use_id content is_error",
    "ImageBlock": UNSERVED_BLOCK,
    "DocumentBlock": UNSERVED_BLOCK,
    "SearchResultBlock": UNSERVED_BLOCK,
}

BLOCKS = (
    "TextBlock ThinkingBlock RedactedThinkingBlock ToolUseBlock ToolResultBlock ImageBlock "
    "DocumentBlock SearchResultBlock"
)
ITEMS = "openai.InputMessage InputFunctionCall InputFunctionCallOutput InputReasoning"
GENERATION = "CompletionRequest ChatCompletionRequest"

WITHOUT_EFFECT: dict[str, str] = {
    # Field name as the table writes it -> the types that have the field.
    "user": GENERATION
    + " ResponsesRequest EmbeddingRequest ClassifyRequest ScoreRequest RerankRequest",
    "metadata": GENERATION + " ResponsesRequest MessagesRequest",
    "safety_identifier": GENERATION + " ResponsesRequest",
    "session_id": "ChatCompletionRequest",
    "user_profile_id": "CountTokensRequest MessagesRequest",
    "service_tier": GENERATION + " ResponsesRequest MessagesRequest",
    "prompt_cache_key": GENERATION + " ResponsesRequest",
    "prompt_cache_retention": GENERATION + " ResponsesRequest",
    "prompt_cache_options": "ResponsesRequest",
    "prompt_cache_breakpoint": "InputPart",
    "cache_control": f"CountTokensRequest MessagesRequest Tool ContentPart ToolDefinition {BLOCKS}",
    "include_obfuscation": "StreamOptions",
    "verbosity": "ChatCompletionRequest TextOptions",
    "store": "ChatCompletionRequest",
    "name": "JsonSchemaFormat TextFormat InputFunctionCallOutput",
    "description": "JsonSchemaFormat TextFormat",
    "strict": "JsonSchemaFormat TextFormat",
    "eager_input_streaming": "Tool",
    "refusal": "ChatMessage",
    "index": "MessageToolCall",
    "status": ITEMS,
    "phase": "openai.InputMessage",
    "created_by": "InputFunctionCall InputFunctionCallOutput",
    "async": "InputFunctionCall",
    "async_": "InputFunctionCall",
    "signature": "ThinkingBlock",
    "data": "RedactedThinkingBlock",
}

SOMETIMES = {
    "reasoning_effort",
    "reasoning.effort",
    "output_config.effort",
    "thinking.budget_tokens",
    "thinking_token_budget",
    "skip_special_tokens",
    "stream_options.include_usage",
    "include",
    "add_generation_prompt",
    "enable_thinking",
    "thinking",
    "reasoning.enabled",
    "truncation",
}
"""Fields of the table that do have an effect in another place or with another model."""


def kind_name(kind: type[Any]) -> str:
    if kind.__name__ != "InputMessage":
        return kind.__name__
    return ("anthropic." if ".messages." in kind.__module__ else "openai.") + kind.__name__


def kinds() -> dict[str, type[Any]]:
    """Returns every struct that may occur in a body, by name."""
    found: dict[str, type[Any]] = {}
    waiting: list[Any] = [op.body for op in OPERATIONS if op.body is not None] + UNTYPED
    while waiting:
        info = waiting.pop()
        if isinstance(info, type):
            info = msgspec.inspect.type_info(info)
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(info, name):
                waiting.append(getattr(info, name))
        waiting += getattr(info, "types", ())
        if isinstance(info, msgspec.inspect.StructType) and kind_name(info.cls) not in found:
            found[kind_name(info.cls)] = info.cls
            waiting += [field.type for field in info.fields]
    return found


KINDS = kinds()


def ecosystem(kind: type[Any]) -> Ecosystem:
    return getattr(kind, "ECOSYSTEM", Ecosystem())


def fields(kind: type[Any]) -> list[str]:
    """Returns the field names of a struct as a client writes them."""
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def without_effect(kind: str) -> set[str]:
    return {field for field, where in WITHOUT_EFFECT.items() if kind in where.split()}


def test_all_bodies_are_known():
    assert set(KINDS) == set(EFFECTIVE)
    assert {"CompletionRequest", "MessagesRequest", "ToolUseBlock", "InputPart"} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_an_effect_or_is_refused_or_is_listed(kind):
    refused = set(not_served(KINDS[kind]))
    effective = set(EFFECTIVE[kind].split())
    listed = without_effect(kind)
    assert set(fields(KINDS[kind])) == effective | refused | listed
    assert not effective & listed
    table = ecosystem(KINDS[kind])
    names = [*table.neutral, *table.accepted, *table.means]
    assert len(names) == len(set(names))
    assert not set(names) & set(fields(KINDS[kind]))
    assert set(table.means.values()) <= effective
    assert not refused & listed
    if not issubclass(KINDS[kind], blocks.UnservedBlock):
        assert not effective & refused


def documented() -> Iterator[str]:
    _, _, behind = DOCS.read_text().partition(HEADING + "\n")
    table, _, _ = behind.partition("\n## ")
    for line in table.splitlines():
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", line.split("|")[1])


def test_the_table_of_the_docs_is_this_list():
    listed = list(documented())
    assert len(listed) == len(set(listed))
    taken = {name for kind in KINDS.values() for name in ecosystem(kind).accepted}
    assert set(listed) == set(WITHOUT_EFFECT) | SOMETIMES | taken


# --------------------------------------------------------------------------------------- refusals

HELLO = [{"role": "user", "content": "hi"}]
MINIMAL: list[tuple[type[Any], dict[str, Any]]] = [
    (CompletionRequest, {"model": "m", "prompt": "hi"}),
    (ChatCompletionRequest, {"model": "m", "messages": HELLO}),
    (ResponsesRequest, {"model": "m", "input": "hi"}),
    (CountTokensRequest, {"model": "m", "messages": HELLO}),
    (MessagesRequest, {"model": "m", "messages": HELLO, "max_tokens": 5}),
]


REFUSED = [
    (kind, least, name, neutral)
    for kind, least in MINIMAL
    for name, neutral in {**not_served(kind), **kind.ECOSYSTEM.neutral}.items()
]


@pytest.mark.parametrize(("kind", "least", "name", "values"), REFUSED)
def test_unsupported_fields_are_refused_unless_their_value_is_neutral(kind, least, name, values):
    for neutral in (None, *values):
        decode(json.dumps({**least, name: neutral}).encode(), kind)
    types = {field.name: str(field.type) for field in msgspec.structs.fields(kind)}
    type_ = types.get(name, "Any")
    requesting: Any = ["x"] if "list" in type_ else 3 if "int" in type_ else "something"
    if "bool" in type_:
        requesting = True
    with pytest.raises(BadRequest) as refusal:
        decode(json.dumps({**least, name: requesting}).encode(), kind)
    assert (refusal.value.param, refusal.value.code) == (name, "unsupported_value")


def chat_with(part: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize("name", not_served(ContentPart))
def test_a_part_of_text_may_not_bring_an_image_with_it(name):
    part = {"type": "text", "text": "what is this?", name: {"url": "data:,"}}
    with pytest.raises(BadRequest) as refusal:
        decode(json.dumps(chat_with(part)).encode(), ChatCompletionRequest)
    assert refusal.value.param == f"messages[0].content[0].{name}"


@pytest.mark.parametrize("name", not_served(InputPart))
def test_a_part_of_an_item_may_not_bring_an_image_with_it(name):
    part = {"type": "input_text", "text": "what is this?", name: "x"}
    payload = {"model": "m", "input": [{"role": "user", "content": [part]}]}
    request = decode(json.dumps(payload).encode(), ResponsesRequest)
    with pytest.raises(BadRequest) as refusal:
        request.items()
    assert refusal.value.param == f"input[0].content[0].{name}"


def test_a_function_may_not_be_a_custom_tool_too():
    assert set(not_served(ToolDefinition)) == {"custom"}
    tool = {"type": "function", "function": {"name": "f"}, "custom": {"name": "g"}}
    with pytest.raises(BadRequest) as refusal:
        decode(
            json.dumps({"model": "m", "messages": HELLO, "tools": [tool]}).encode(),
            ChatCompletionRequest,
        )
    assert refusal.value.param == "tools[0].custom"


def test_a_response_has_no_usage_with_every_event():
    payload = {"model": "m", "input": "hi", "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    with pytest.raises(BadRequest) as refusal:
        decode(json.dumps({**payload, "stream_options": options}).encode(), ResponsesRequest)
    assert refusal.value.param == "stream_options.continuous_usage_stats"


HISTORY = (
    "ChatMessage ContentPart MessageToolCall FunctionCall ToolDefinition FunctionDefinition "
    "InputPart FunctionTool anthropic.InputMessage Tool " + BLOCKS + " " + ITEMS
)


def test_unknown_fields_are_ignored_in_a_history_and_refused_elsewhere():
    """The decoder refuses unknown fields everywhere. In a history they are removed before decoding
    (`cluster/text/schema/unknown_fields.py`)."""
    assert all(
        issubclass(k, RequestBody) or k in (StructuredOutputs, RepetitionDetection)
        for k in KINDS.values()
    )
    assert all(k.__struct_config__.forbid_unknown_fields for k in KINDS.values())
    assert {name for name, kind in KINDS.items() if issubclass(kind, HistoryPart)} == set(
        HISTORY.split()
    )


# -------------------------------------------------------------------------------- priority

ROUTES = {
    "/v1/completions": body([1, 2], 2),
    "/v1/chat/completions": {"model": "fake", "messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"model": "fake", "input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "fake", "messages": HELLO, "max_tokens": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_priority_is_refused_without_the_priority_policy(tmp_path, policy):
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)

    async def scenario() -> list[tuple[int, int, str, int]]:
        results = []
        settings = {"scheduler.policy": policy}
        async with FakeCluster(tmp_path, **settings).serving() as cluster:
            engine = await cluster.join(0)
            for path, payload in ROUTES.items():
                neutral = await cluster.client.post(path, json={**payload, "priority": 0})
                requesting = await cluster.client.post(path, json={**payload, "priority": 3})
                results.append(
                    (
                        neutral.status_code,
                        requesting.status_code,
                        (requesting.json().get("error") or {}).get("message", ""),
                        engine.arrived[-1].priority,
                    )
                )
        return results

    for neutral, requesting, message, priority in asyncio.run(scenario()):
        if policy == "priority":
            assert (neutral, requesting, priority) == (200, 200, 3)
        else:
            assert (neutral, requesting, priority) == (200, 400, 0)
            assert "priority=3" in message and "scheduler.policy" in message


# -------------------------------------------------------------------------------- repetition


@pytest.mark.slow
def test_a_repetition_is_detected_unless_it_is_off(tmp_path):
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    sent = [
        {"max_pattern_size": 8, "min_count": 3},
        {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 2},
        {},
    ]

    async def scenario() -> list[RepetitionPattern | None]:
        async with FakeCluster(tmp_path).serving() as cluster:
            engine = await cluster.join(0)
            for path in ("/v1/completions", "/v1/chat/completions"):
                for one in sent:
                    payload = {**ROUTES[path], "repetition_detection": one}
                    answer = await cluster.client.post(path, json=payload)
                    assert answer.status_code == 200, answer.text
            wrong = {**ROUTES["/v1/completions"], "repetition_detection": {"min_count": 1}}
            answer = await cluster.client.post("/v1/completions", json=wrong)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "repetition_detection.min_count"
            return [request.repetition for request in engine.arrived]

    patterns = [RepetitionPattern(1, 8, 3), RepetitionPattern(2, 8, 2), None]
    assert asyncio.run(scenario()) == 2 * patterns
