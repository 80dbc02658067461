"""The models served, and their tokenizers."""

from __future__ import annotations

from typing import Any

from swell.cluster.openai.base import Body, RequestBody
from swell.cluster.openai.messages import ChatMessage, ToolDefinition, check_messages
from swell.cluster.params import BadRequest


class ModelCard(Body, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "swell"
    root: str
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
    add_special_tokens: bool = True
    """For a prompt only: a chat template writes its own."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

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


class DetokenizeResponse(Body, kw_only=True):
    prompt: str
