"""Request bodies of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from swell.cluster.api.bodies.generation_body import StreamOptions
from swell.cluster.api.bodies.sampling_fields import SamplingFields, check_routing
from swell.cluster.api.bodies.timings import IncludeTimings
from swell.cluster.api.responses.input_items import FORMS, read_input
from swell.cluster.api.responses.items import Item
from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.exact_numbers import encode_json
from swell.cluster.text.json_types import JsonSchema
from swell.cluster.text.params.validate_params import check_length
from swell.cluster.text.schema.chat_messages import MAX_TOOLS, FunctionDefinition
from swell.cluster.text.schema.decode import decode_part
from swell.cluster.text.schema.known_fields import RESPONSES
from swell.cluster.text.schema.request_body import NotServed, RequestBody, neutral
from swell.configs.error_text import shown

LOGPROBS = "message.output_text.logprobs"
INCLUDE = (LOGPROBS, "reasoning.encrypted_content")
"""Allowed values of `include`. Reasoning is sent as plain text in `content`, and clients may send
it back in this form: nothing is encrypted."""
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


class ReasoningOptions(RequestBody, kw_only=True):
    effort: str | None = None
    """Passed to the chat template; its meaning depends on the model."""
    summary: Annotated[str | None, neutral("auto")] = None
    """Summaries are not made: the whole reasoning is sent."""
    generate_summary: Annotated[str | None, neutral("auto")] = None
    context: Annotated[str | None, neutral("auto")] = None
    mode: Annotated[str | None, neutral("standard")] = None


class TextFormat(RequestBody, kw_only=True):
    """The format of the answer. The schema is always enforced, also with `strict: false`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: JsonSchema | None = None
    strict: bool | None = None

    def check(self) -> None:
        if self.type == "json_schema" and (self.schema is None or self.name is None):
            missing = "schema" if self.schema is None else "name"
            raise BadRequest(
                f"text.format.type='json_schema' needs text.format.{missing}",
                f"text.format.{missing}",
                "missing_field",
            )
        if self.type != "json_schema" and self.schema is not None:
            raise BadRequest(
                f"text.format.type={self.type!r} does not allow text.format.schema; send "
                "type='json_schema'",
                "text.format.schema",
            )


class TextOptions(RequestBody, kw_only=True):
    format: TextFormat | None = None
    verbosity: Any = None
    """Accepted; chat templates do not use it."""


class FunctionTool(FunctionDefinition, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call, without the enclosing object of chat requests."""


class FunctionChoice(RequestBody, kw_only=True):
    type: Literal["function"]
    name: str


class AllowedToolsChoice(RequestBody, kw_only=True):
    """A subset of the request's tools, which the model may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class ResponsesRequest(SamplingFields, kw_only=True, omit_defaults=True):
    model: str | None = None
    """None: the model that is served."""
    input: str | list[msgspec.Raw]
    """A text, or items: messages, function_call, function_call_output, reasoning."""
    instructions: str | None = None
    """The system message; it is not inherited from `previous_response_id`."""
    previous_response_id: str | None = None
    """A stored response, whose input and output come before this input."""
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    """Function tools; built-in tools are refused."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    """Store the response for later requests (default: true, unless storing is disabled)."""
    background: bool | None = None
    """Return at once and compute the response in the background; the client retrieves it later.
    With `stream` its events are sent as long as the client is connected, and the computation goes
    on after the client has left."""
    metadata: dict[str, str] | None = None
    user: str | None = None
    """This field and the next ones are returned and do not change the answer."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    service_tier: Any = None

    chat_template_kwargs: dict[str, Any] | None = None
    include_timings: IncludeTimings = None

    truncation: Annotated[str | None, neutral("disabled", "auto")] = None
    max_tool_calls: Annotated[int | None, neutral()] = None
    conversation: NotServed = None
    prompt: NotServed = None
    context_management: Annotated[Any, neutral([])] = None
    moderation: NotServed = None
    background_options: NotServed = None
    access_programs: NotServed = None
    image: NotServed = None

    ECOSYSTEM = RESPONSES
    PARTS = {"input": FORMS, "tools": {"function": FunctionTool}}

    def check(self) -> None:
        self.refuse_unsupported()
        if self.reasoning is not None:
            self.reasoning.refuse_unsupported("reasoning.")
        if self.text is not None and self.text.format is not None:
            self.text.format.check()
        self._check_stream()
        self._check_include()
        check_metadata(self.metadata)
        check_routing(self.cache_salt, self.data_parallel_rank, self.priority)
        self.function_tools()
        self.function_choice()

    def items(self) -> list[Item]:
        """Returns the input as complete items. Raises `BadRequest`."""
        return read_input(self.input)

    def function_tools(self) -> list[FunctionTool]:
        """Returns the tools of the request. Raises `BadRequest`, which names the type of a built-in
        tool."""
        tools: list[FunctionTool] = []
        check_length("tools", self.tools or (), "tools", MAX_TOOLS)
        for index, tool in enumerate(self.tools or ()):
            path, kind = f"tools[{index}]", tool.get("type")
            if kind != "function":
                problem = "is not supported; only 'function' is"
                raise bad_value(f"{path}.type", kind, problem, "unsupported_value")
            tools.append(decode_part(encode_json(tool), FunctionTool, path))
        return tools

    def function_choice(self) -> str | FunctionChoice | AllowedToolsChoice | None:
        """Returns none, auto, required, one function, or the functions that may be called. Raises
        `BadRequest`."""
        choice = self.tool_choice
        if choice is None or choice in ("none", "auto", "required"):
            return choice  # type: ignore[return-value]  # a dict is not in the tuple of strings
        kind = None if isinstance(choice, str) else _CHOICES.get(str(choice.get("type")))
        if isinstance(choice, str) or kind is None:
            raise bad_value(
                "tool_choice",
                choice,
                "is not supported; it may be 'none', 'auto', 'required', {'type': 'function', "
                "'name': NAME} or {'type': 'allowed_tools', 'mode': 'auto' or 'required', "
                "'tools': [{'type': 'function', 'name': NAME}]}",
                "unsupported_value",
            )
        return decode_part(encode_json(choice), kind, "tool_choice")

    def _check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed with stream=true", "stream_options")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise BadRequest(
                "stream_options.continuous_usage_stats=true is not supported: the last event of "
                "the response has its usage; leave it out",
                "stream_options.continuous_usage_stats",
                "unsupported_value",
            )
        if not self.background:
            return
        if self.store is False:
            raise BadRequest(
                "background=true needs store=true: the answer can only be retrieved from the store",
                "store",
            )

    def _check_include(self) -> None:
        for index, name in enumerate(self.include or ()):
            if name not in INCLUDE:
                problem = f"is not supported; it may be {' or '.join(map(repr, INCLUDE))}"
                raise bad_value(f"include[{index}]", name, problem, "unsupported_value")
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise bad_value("top_logprobs", self.top_logprobs, f"needs include=[{LOGPROBS!r}]")


_CHOICES: dict[str, type[FunctionChoice | AllowedToolsChoice]] = {
    "function": FunctionChoice,
    "allowed_tools": AllowedToolsChoice,
}


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Checks OpenAI's limits. Raises `BadRequest`."""
    pairs = metadata or {}
    check_length("metadata", pairs, "pairs", MAX_METADATA)
    for key, value in pairs.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            raise BadRequest(
                f"metadata[{shown(key)}]: the key has {len(key)} characters and the value "
                f"{len(value)}; at most {MAX_METADATA_KEY_CHARS} and {MAX_METADATA_VALUE_CHARS} "
                "are allowed",
                "metadata",
            )
