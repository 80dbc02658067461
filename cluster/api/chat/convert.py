"""Converts a body of `/v1/chat/completions` to a `GenerationRequest`. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.text.json_types import JsonValue
from swell.cluster.text.prompt.chat_template import TemplateOptions
from swell.cluster.text.prompt.generation_request import Conversation, GenerationRequest


def to_generation_request(
    body: ChatCompletionRequest, defaults: Mapping[str, JsonValue]
) -> GenerationRequest:
    """Converts a checked body. `defaults` are the model's, for fields of `SamplingParams` that the
    body leaves out. Raises `BadRequest`."""
    return body.generation_request(
        conversation(body), defaults, add_special_tokens=False, prompt_field="messages"
    )


def conversation(body: ChatCompletionRequest) -> Conversation:
    continues = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    template = TemplateOptions(
        tools=body.tools if body.tools and body.tool_choice != "none" else (),
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        template=body.chat_template,
        documents=body.documents or (),
        variables=body.template_variables(),
    )
    return Conversation(
        messages=body.messages,
        template=template,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking_token_budget=body.thinking_token_budget,
    )
