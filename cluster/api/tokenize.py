"""The routes `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.api.endpoints import json_response, route
from swell.cluster.api.request_context import context_of
from swell.cluster.api.services import Services
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.prompt.chat_template import TemplateOptions
from swell.cluster.text.prompt.generation_request import Conversation, Prompt
from swell.cluster.text.prompt.truncation import TokenizeOptions
from swell.cluster.text.schema.chat_messages import (
    ChatMessage,
    ToolDefinition,
    check_messages,
    keep_tools,
)
from swell.cluster.text.schema.known_fields import DETOKENIZE, TOKENIZE
from swell.cluster.text.schema.request_body import RequestBody


class TokenizeRequest(RequestBody, kw_only=True):
    """A `prompt`, or `messages` as they would be sent for an answer."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    """None: true for a prompt, and false for messages, where the chat template writes its own
    special tokens."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """A template to use instead of the model's, if `serve.request_chat_template` allows it."""
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


def tokenize_input(body: TokenizeRequest) -> tuple[list[Prompt] | Conversation, TokenizeOptions]:
    """Returns the prompt or conversation of a checked body, and how it is tokenized."""
    add = body.add_special_tokens
    if body.messages is None:
        assert body.prompt is not None, "the body was checked"
        return [body.prompt], TokenizeOptions(add_special_tokens=add is not False)
    template = TemplateOptions(
        tools=body.tools or (),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template=body.chat_template,
        variables=body.chat_template_kwargs or {},
    )
    conversation = Conversation(messages=body.messages, template=template)
    return conversation, TokenizeOptions(add_special_tokens=bool(add))


class TokenizeRoutes:
    def __init__(self, services: Services) -> None:
        self._read = services.read
        self._processor = services.input_processor
        self._prompts = services.prompts
        self._offload = services.offloads.bodies

    def routes(self) -> list[Route]:
        return [
            route("/tokenize", self._tokenize, "POST"),
            route("/detokenize", self._detokenize, "POST"),
        ]

    async def _tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeRequest)
        size = context_of(request).body_bytes
        ids = await self._processor.tokenize(lambda: tokenize_input(body), size)
        return json_response(await self._offload.run_sized(size, self._response, body, ids))

    def _response(self, body: TokenizeRequest, ids: list[int]) -> bytes:
        prompts = self._prompts
        texts = prompts.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return msgspec.json.encode(
            TokenizeResponse(
                tokens=ids, count=len(ids), max_model_len=prompts.max_model_len, token_strs=texts
            )
        )

    async def _detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeRequest)
        text = await self._offload.run_sized(
            context_of(request).body_bytes, self._prompts.decode, body.tokens
        )
        return json_response(DetokenizeResponse(prompt=text))
