"""Response bodies of `/v1/responses`. A response repeats the request, as the server understood it,
and contains the items of the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.api.bodies.timings import Timings
from swell.cluster.api.responses.items import Item, OutputItem, new_id
from swell.cluster.api.responses.protocol import ResponsesRequest
from swell.cluster.text.errors import bad_value
from swell.cluster.text.exact_numbers import encode_json

SentObject = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
"""An object of the request, with all digits of its numbers."""


class InputTokensDetails(Body, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    """Always 0: prefixes are cached automatically and for free."""


class OutputTokensDetails(Body, kw_only=True):
    reasoning_tokens: int = 0
    """Number of tokens of the reasoning's text, tokenized again; markers are not counted."""


class ResponseUsage(Body, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Body, kw_only=True):
    message: str
    code: Literal["server_error", "invalid_prompt"] = "server_error"
    """OpenAI's other codes do not fit. `invalid_prompt` means that the request is the cause."""


class IncompleteDetails(Body, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseText(Body, kw_only=True):
    format: SentObject
    verbosity: str = "medium"


class ResponseBody(Body, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["completed", "incomplete", "failed", "cancelled", "queued", "in_progress"]
    background: bool
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    """Whether the response is stored; false also if storing it has failed."""
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[SentObject]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    timings: Timings | UnsetType = UNSET

    def fail(self, why: str, status: int = 500) -> None:
        """Ends the response with an error. `status` is the HTTP status of that error."""
        code: Literal["server_error", "invalid_prompt"]
        code = "invalid_prompt" if status == 400 else "server_error"
        self.status, self.error = "failed", ResponseFailure(message=why, code=code)


class ResponseItemList(Body, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseDeleted(Body, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def begin_response(body: ResponsesRequest, model: str, *, store: bool) -> ResponseBody:
    """Returns the response to a request before any output exists."""
    form: object = {"type": "text"}
    if body.text and body.text.format:
        is_schema = body.text.format.type == "json_schema"
        form = body.text.format if is_schema else {"type": body.text.format.type}
    return ResponseBody(
        id=new_id("resp"),
        created_at=int(time.time()),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        safety_identifier=body.safety_identifier,
        store=store,
        temperature=1.0 if body.temperature is None else body.temperature,
        text=ResponseText(format=_as_sent(form)),
        tool_choice=body.tool_choice or "auto",
        tools=[_as_sent(tool) for tool in body.function_tools()],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )


def _as_sent(part: object) -> msgspec.Raw:
    return msgspec.Raw(encode_json(part))


def item_list(
    items: Sequence[Item], *, limit: int, after: str | None, newest_first: bool
) -> ResponseItemList:
    """Returns one page of a response's input. Raises `BadRequest` for an unknown `after`."""
    ordered = list(reversed(items)) if newest_first else list(items)
    ids = [item.id for item in ordered]
    if after is not None and after not in ids:
        raise bad_value("after", after, "is not the id of an input item")
    start = 0 if after is None else ids.index(after) + 1
    page = ordered[start : start + limit]
    return ResponseItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=start + limit < len(ordered),
    )
