"""`/v1/chat/completions`: what a client may send, and what it gets.

`stop_reason`, `token_ids`, `prompt_token_ids`, `prompt_logprobs` and `reasoning_content` are not
OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from swell.cluster.openai.base import Body, Usage
from swell.cluster.openai.generation import GenerationRequest
from swell.cluster.openai.logprobs import ChatLogprobs, PromptLogprobs
from swell.cluster.openai.messages import (
    ChatMessage,
    ToolChoice,
    ToolDefinition,
    check_messages,
    check_tools,
)
from swell.cluster.params import BadRequest, shown


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """OpenAI's newer name of `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """false: one call at most."""
    reasoning_effort: str | None = None
    """Handed to the chat template; what it means is the model's. `none`: no reasoning."""
    thinking_token_budget: int | None = None
    """The most tokens of reasoning; then its end is forced. -1: no limit."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The answer goes on with the last message, which is the assistant's."""
    chat_template: str | None = None
    """A template instead of the model's, where `serve.request_chat_template` allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, as `enable_thinking`."""

    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    verbosity: str | None = None
    web_search_options: Any = None
    store: bool | None = None

    NOT_SERVED = {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "store": (False,),
    }

    def check(self) -> None:
        super().check()
        check_messages(self.messages)
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) == 2:
            raise BadRequest(
                f"max_tokens={shown(self.max_tokens)} and max_completion_tokens="
                f"{shown(self.max_completion_tokens)} differ; send one of them",
                "max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise BadRequest(
                f"top_logprobs={shown(self.top_logprobs)} needs logprobs=true, and logprobs="
                f"{shown(self.logprobs)}",
                "top_logprobs",
            )
        check_tools(self.tools, self.tool_choice)
        budget = self.thinking_token_budget
        if budget is not None and not -1 <= budget < 2**31:
            raise BadRequest(
                f"thinking_token_budget={shown(budget)} must be between 0 and {2**31 - 1}, or -1 "
                "for no limit",
                "thinking_token_budget",
            )
        self._check_continuation()

    def _check_continuation(self) -> None:
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise BadRequest(
                "continue_final_message=true and add_generation_prompt=true contradict each "
                "other: an answer goes on with the last message or begins a new one",
                "continue_final_message",
            )
        if self.messages[-1].role != "assistant":
            raise BadRequest(
                "continue_final_message=true needs a last message of role 'assistant', and it is "
                f"{self.messages[-1].role!r}",
                "continue_final_message",
            )

    def answer_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def own_wishes(self) -> Mapping[str, Any]:
        return {"logprobs": self.top_logprobs or 0} if self.logprobs else {}


class CalledFunction(Body, kw_only=True):
    name: str
    arguments: str


class ToolCall(Body, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatResponseMessage(Body, kw_only=True):
    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Body, kw_only=True):
    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Body, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Body, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Body, kw_only=True):
    """The first of a call has its id and name; the others more of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Body, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Body, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Body, kw_only=True):
    """One event of a chat stream; `usage` as in `CompletionChunk`."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
