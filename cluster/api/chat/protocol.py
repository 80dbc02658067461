"""Request and response bodies of `/v1/chat/completions`.

`stop_reason`, `token_ids`, `prompt_token_ids`, `prompt_logprobs`, `routed_experts`,
`reasoning_content` and `timings` are not part of OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType

from swell.cluster.api.answers.logprobs import ChatLogprobs, PromptLogprobs
from swell.cluster.api.bodies.generation_body import GenerationBody
from swell.cluster.api.bodies.protocol_base import Body, Usage
from swell.cluster.api.bodies.routed_experts import RoutedExpertsBody
from swell.cluster.api.bodies.timings import Timings
from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.json_types import JsonObject, JsonValue
from swell.cluster.text.prompt.chat_template import THINKING_VARIABLES
from swell.cluster.text.schema.chat_messages import (
    ChatMessage,
    ToolChoice,
    ToolDefinition,
    check_messages,
    check_tools,
    keep_tools,
)
from swell.cluster.text.schema.known_fields import CHAT
from swell.cluster.text.schema.request_body import NotServed, RequestBody, neutral
from swell.configs.error_text import shown

_SWITCHES = attrgetter(
    "chat_template_kwargs", "enable_thinking", "thinking", "reasoning", "reasoning_effort"
)
"""The fields that `template_variables` reads."""
_NO_SWITCH = (None,) * 5
_PARAM_NAMES = {"logprobs": "top_logprobs"}
"""Fields of `SamplingParams` -> the field of a chat request that sets them."""
_NEWER_NAMES = {**_PARAM_NAMES, "max_tokens": "max_completion_tokens"}


class ThinkingSwitch(RequestBody, kw_only=True):
    type: Literal["enabled", "disabled"]


class ReasoningSwitch(RequestBody, kw_only=True):
    effort: str | None = None
    enabled: bool | None = None


class ChatCompletionRequest(GenerationBody, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """OpenAI's newer name of `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    reasoning_effort: str | None = None
    """Passed to the chat template; its meaning depends on the model. `none`: no reasoning; any
    other effort switches reasoning on."""
    thinking_token_budget: int | None = None
    """The maximum number of reasoning tokens, after which the end of the reasoning is forced. -1:
    no limit."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The answer continues the last message, which must be the assistant's."""
    chat_template: str | None = None
    """A template to use instead of the model's, if `serve.request_chat_template` allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `enable_thinking`."""
    enable_thinking: bool | None = None
    """Sets the variables `enable_thinking` and `thinking` of the chat template: templates read one
    or the other."""
    thinking: bool | ThinkingSwitch | None = None
    """Another name of `enable_thinking`, with two forms."""
    reasoning: ReasoningSwitch | None = None
    """Another form of `reasoning_effort` and `enable_thinking`."""
    include_reasoning: bool | None = None
    """false: the answer is sent without its reasoning."""
    documents: list[dict[str, Any]] | None = None
    """Documents for chat templates that support them."""

    functions: Annotated[list[Any] | None, neutral([])] = None
    function_call: Annotated[Any, neutral("none", "auto")] = None
    modalities: Annotated[list[str] | None, neutral(["text"])] = None
    audio: NotServed = None
    prediction: NotServed = None
    web_search_options: NotServed = None
    verbosity: Any = None
    """This field and the next one do not change the answer."""
    store: Any = None

    ECOSYSTEM = CHAT

    def keep(self, body: bytes) -> None:
        keep_tools(self.tools, body)

    def check(self) -> None:
        super().check()
        check_messages(self.messages)
        limit, newer = self.max_tokens, self.max_completion_tokens
        if limit is not None and newer is not None and limit != newer:
            problem = f"and max_completion_tokens={shown(newer)} differ; send one of them"
            raise bad_value("max_tokens", limit, problem)
        if self.top_logprobs and not self.logprobs:
            problem = f"needs logprobs=true, but logprobs={shown(self.logprobs)}"
            raise bad_value("top_logprobs", self.top_logprobs, problem)
        check_tools(self.tools, self.tool_choice)
        budget = self.thinking_token_budget
        if budget is not None and not -1 <= budget < 2**31:
            problem = f"must be between 0 and {2**31 - 1}, or -1 for no limit"
            raise bad_value("thinking_token_budget", budget, problem)
        self._check_continuation()
        self.template_variables()

    def _check_continuation(self) -> None:
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise BadRequest(
                "continue_final_message=true and add_generation_prompt=true contradict each "
                "other: the answer either continues the last message or starts a new one; send "
                "one of them",
                "continue_final_message",
            )
        if self.messages[-1].role != "assistant":
            raise BadRequest(
                "continue_final_message=true needs a last message with role 'assistant', but its "
                f"role is {self.messages[-1].role!r}",
                "continue_final_message",
            )

    def template_variables(self) -> JsonObject:
        """Returns the variables that the chat template gets in addition to the messages. An effort
        also switches reasoning on, since some templates leave it off by default, unless another
        field says otherwise. Raises `BadRequest` if two fields contradict each other."""
        chosen: dict[str, tuple[str, JsonValue]] = {}
        if _SWITCHES(self) == _NO_SWITCH:
            return {}
        for field, name, value in self._variables():
            before, known = chosen.setdefault(name, (field, value))
            if known != value:
                values = f"{shown(value)} and {shown(known)}"
                raise BadRequest(
                    f"{field} and {before} contradict each other: {values}; send one of them", field
                )
        variables: JsonObject = {name: value for name, (_, value) in chosen.items()}
        has_effort = self.reasoning_effort or (self.reasoning and self.reasoning.effort)
        if has_effort and variables.keys().isdisjoint(THINKING_VARIABLES):
            variables |= dict.fromkeys(THINKING_VARIABLES, True)
        return variables

    def _variables(self) -> Iterator[tuple[str, str, JsonValue]]:
        """Yields (field of the request, variable of the template, value)."""
        for name, value in (self.chat_template_kwargs or {}).items():
            yield f"chat_template_kwargs.{name}", name, value
        thinking, reasoning = self.thinking, self.reasoning or ReasoningSwitch()
        if isinstance(thinking, ThinkingSwitch):
            thinking = thinking.type == "enabled"
        efforts = {"reasoning_effort": self.reasoning_effort, "reasoning.effort": reasoning.effort}
        switches = {
            "enable_thinking": self.enable_thinking,
            "thinking": thinking,
            "reasoning.enabled": reasoning.enabled,
            **{field: False for field, effort in efforts.items() if effort == "none"},
        }
        for field, value in switches.items():
            if value is not None:
                for name in THINKING_VARIABLES:
                    yield field, name, value
        for field, effort in efforts.items():
            if effort is not None:
                yield field, "reasoning_effort", effort

    @property
    def answer_role(self) -> str:
        """The role of the message that the answer is or continues."""
        begins = self.add_generation_prompt
        begins = not self.continue_final_message if begins is None else begins
        return "assistant" if begins else self.messages[-1].role

    @property
    def echoed(self) -> str:
        """The text that the answer begins with: with `echo`, the last message, if it has the role
        of the answer."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == self.answer_role else ""

    def answer_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def endpoint_sampling_params(self) -> Mapping[str, JsonValue]:
        return {"logprobs": self.top_logprobs or 0} if self.logprobs else {}

    def param_names(self) -> Mapping[str, str]:
        return _NEWER_NAMES if self.max_completion_tokens is not None else _PARAM_NAMES


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
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The reasoning under vLLM's newer name. A stream only sends `reasoning_content`, because some
    clients would show the two fields as two texts."""
    tool_calls: list[ToolCall] | UnsetType = UNSET
    """Absent if the answer does not call tools, as in OpenAI's API."""


class ChatChoice(Body, kw_only=True):
    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: RoutedExpertsBody | UnsetType = UNSET


class ChatCompletion(Body, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None = None
    """Always null: there is one tier."""
    system_fingerprint: str | None = None
    """The version of weights and limits that computed the whole answer."""
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    timings: Timings | UnsetType = UNSET


class FunctionDelta(Body, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Body, kw_only=True):
    """Part of a tool call. The first part has the id and name of the call; the others have more of
    its arguments."""

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
    routed_experts: RoutedExpertsBody | UnsetType = UNSET
    """Set in the last chunk of a choice if `return_routed_experts` is set."""


class ChatChunk(Body, kw_only=True):
    """One event of a chat stream. `usage` and `timings` are as in `CompletionChunk`. The first
    event has the token ids of the prompt if `return_token_ids` is set."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | UnsetType = UNSET
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
