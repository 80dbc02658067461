"""The models served, and their tokenizers."""

from __future__ import annotations

from typing import Any

from swell.cluster.api.protocol_base import Body
from swell.cluster.text.sampling_params import BadRequest
from swell.cluster.text.schema.chat_messages import (
    ChatMessage,
    ToolDefinition,
    check_messages,
    keep_tools,
)
from swell.cluster.text.schema.known_fields import DETOKENIZE, TOKENIZE
from swell.cluster.text.schema.request_body import RequestBody


class ModelCard(Body, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "swell"
    root: str | None = None
    """Its own name: there are no adapters, and the folder is the operator's business."""
    parent: str | None = None
    max_model_len: int


class ModelList(Body, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeRequest(RequestBody, kw_only=True):
    """A `prompt`, or `messages` as they would be sent for an answer."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    """None: true for a prompt, and false for messages, where the chat template writes its own."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """A template instead of the model's, where `serve.request_chat_template` allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    ECOSYSTEM = TOKENIZE

    def keep(self, body: bytes) -> None:
        keep_tools(self.tools, body)

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("send either 'prompt' or 'messages'", "prompt")
        if self.messages is not None:
            check_messages(self.messages)


class TokenizeResponse(Body, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody, kw_only=True):
    model: str | None = None
    tokens: list[int]

    ECOSYSTEM = DETOKENIZE


class DetokenizeResponse(Body, kw_only=True):
    prompt: str
