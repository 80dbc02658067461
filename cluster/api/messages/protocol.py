"""Request bodies of `/v1/messages` and `/v1/messages/count_tokens`.

`seed`, `priority`, `cache_salt`, `data_parallel_rank`, `include_timings` and `chat_template_kwargs`
are not part of Anthropic's API. They have the same meaning as for chat completions.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from swell.cluster.api.bodies.sampling_fields import check_routing
from swell.cluster.api.bodies.timings import IncludeTimings
from swell.cluster.api.messages.blocks import (
    ContentBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.json_types import JsonSchema
from swell.cluster.text.params.validate_params import (
    MAX_STOP_CHARS,
    MAX_STOP_CHARS_TOTAL,
    MAX_STOP_STRINGS,
    check_length,
    check_total_chars,
)
from swell.cluster.text.schema.chat_messages import missing_field
from swell.cluster.text.schema.known_fields import MESSAGES
from swell.cluster.text.schema.request_body import HistoryPart, NotServed, RequestBody, neutral
from swell.configs.error_text import shown

MAX_TOOLS = 1024
MIN_THINKING_TOKENS = 1024
_KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}\Z")
_ROLES = ("user", "assistant", "system")
_ROLE_OF_BLOCK = {
    ToolResultBlock: "user",
    ToolUseBlock: "assistant",
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
}
"""Blocks that may only occur in messages of one role; `system` messages may only have text."""


class InputMessage(HistoryPart, kw_only=True):
    role: str
    content: str | list[ContentBlock]

    def check_at(self, path: str) -> None:
        if self.role not in _ROLES:
            raise bad_value(f"{path}.role", self.role, f"must be one of {', '.join(_ROLES)}")
        for index, block in enumerate(self.blocks):
            where = f"{path}.content[{index}]"
            home = _ROLE_OF_BLOCK.get(type(block), self.role)
            if home != self.role or (self.role == "system" and not isinstance(block, TextBlock)):
                problem = f"is not allowed in a message with role {self.role!r}"
                if home != self.role:
                    problem += f"; send it in a message with role {home!r}"
                raise bad_value(f"{where}.type", block.type, problem)
            block.check_at(where)

    @property
    def blocks(self) -> list[ContentBlock]:
        """The content as blocks. A text is one block, and an empty text is an empty list."""
        if isinstance(self.content, list):
            return self.content
        return [TextBlock(text=self.content)] if self.content else []


class Tool(HistoryPart, kw_only=True):
    """A tool that the client runs. Tools that Anthropic runs are refused by their type."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: JsonSchema | None = None
    strict: bool | None = None
    """Enforce the schema also if the model itself chooses to call."""
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    """Accepted: inputs are always streamed while they are generated."""
    defer_loading: Annotated[bool | None, neutral(False)] = None
    allowed_callers: Annotated[list[str] | None, neutral(["direct"])] = None
    input_examples: Annotated[list[Any] | None, neutral([])] = None

    max_uses: NotServed = None
    """This field and the next ones belong to Anthropic's own tools."""
    allowed_domains: NotServed = None
    blocked_domains: NotServed = None
    user_location: NotServed = None
    max_content_tokens: NotServed = None
    max_characters: NotServed = None
    citations: NotServed = None

    def check_at(self, path: str) -> None:
        if self.type not in (None, "custom"):
            raise bad_value(
                f"{path}.type",
                self.type,
                "is not supported: the server runs no tools; send tools of type 'custom', which "
                "the client runs",
                "unsupported_value",
            )
        self.refuse_unsupported(path + ".")
        if not _TOOL_NAME.match(self.name):
            raise bad_value(
                f"{path}.name", self.name, "must be 1 to 128 letters, digits, '_', '-' or '.'"
            )
        if self.input_schema is None:
            raise missing_field(f"{path}.input_schema")
        if (kind := self.input_schema.get("type")) != "object":
            raise bad_value(f"{path}.input_schema.type", kind, "must be 'object'")


class ToolChoice(RequestBody, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool to call, with type `tool`."""
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestBody, kw_only=True):
    """Passed to the chat template as `enable_thinking`, `thinking` and `thinking_budget`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """The maximum number of reasoning tokens, after which the end of the reasoning is forced."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the text of thinking blocks stays empty."""

    @property
    def token_budget(self) -> int | None:
        return 0 if self.type == "disabled" else self.budget_tokens


class OutputFormat(RequestBody, kw_only=True):
    type: Literal["json_schema"]
    schema: JsonSchema


class OutputConfig(RequestBody, kw_only=True):
    effort: str | None = None
    """Passed to the chat template as `reasoning_effort`."""
    format: OutputFormat | None = None
    """The schema that the answer must follow."""


class CountTokensRequest(RequestBody, kw_only=True):
    """A conversation: the fields that both routes share."""

    model: str | None = None
    """None: the model that is served."""
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `enable_thinking`."""
    user_profile_id: Any = None
    """Does not change the answer."""

    context_management: Annotated[Any, neutral({"edits": []}, _KEEP_THINKING)] = None
    mcp_servers: Annotated[list[Any] | None, neutral([])] = None
    speed: Annotated[str | None, neutral("standard")] = None

    ECOSYSTEM = MESSAGES

    def check(self) -> None:
        self.refuse_unsupported()
        if not self.messages:
            raise BadRequest("messages=[] must have at least one message", "messages")
        for index, message in enumerate(self.messages):
            message.check_at(f"messages[{index}]")
        if isinstance(self.system, list):
            for index, block in enumerate(self.system):
                block.check_at(f"system[{index}]")
        self._check_calls()
        self._check_tools()

    def _check_calls(self) -> None:
        """Checks that every result answers an earlier call, and that the last message does not
        call."""
        called: set[str] = set()
        for place, message in enumerate(self.messages):
            for index, block in enumerate(message.blocks):
                path = f"messages[{place}].content[{index}]"
                if isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                    problem = "is not the id of an earlier tool_use block"
                    raise bad_value(f"{path}.tool_use_id", block.tool_use_id, problem)
                if isinstance(block, ToolUseBlock):
                    if message is self.messages[-1]:
                        problem = "but no message with its tool_result follows"
                        raise BadRequest(f"{path} calls {shown(block.name)}, {problem}", path)
                    called.add(block.id)

    def _check_tools(self) -> None:
        tools, choice = self.tools or [], self.tool_choice
        check_length("tools", tools, "tools", MAX_TOOLS)
        names: set[str] = set()
        for index, tool in enumerate(tools):
            tool.check_at(f"tools[{index}]")
            if tool.name in names:
                path = f"tools[{index}].name"
                raise bad_value(
                    path,
                    tool.name,
                    "is also the name of an earlier tool; give each tool its own name",
                )
            names.add(tool.name)
        if choice is not None:
            _check_choice(choice, names)


def _check_choice(choice: ToolChoice, names: set[str]) -> None:
    if choice.type in ("any", "tool") and not names:
        raise BadRequest(
            f"tool_choice.type={choice.type!r} needs tools, but tools is empty", "tool_choice"
        )
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_value(
            "tool_choice.name",
            choice.name,
            f"does not match tool_choice.type={choice.type!r}: type 'tool' needs the name of a "
            "tool, and the other types do not allow one",
        )
    if choice.name is not None and choice.name not in names:
        problem = f"is not the name of a tool in tools; available: {shown(sorted(names))}"
        raise bad_value("tool_choice.name", choice.name, problem)


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    """0 to 1."""
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    include_timings: IncludeTimings = None

    metadata: Any = None
    """This field and the next one do not change the answer."""
    service_tier: Any = None

    container: NotServed = None
    diagnostics: NotServed = None
    inference_geo: Annotated[str | None, neutral()] = None

    def check(self) -> None:
        super().check()
        if self.max_tokens < 1:
            raise bad_value("max_tokens", self.max_tokens, "must be at least 1")
        if self.temperature is not None and not 0 <= self.temperature <= 1:
            problem = "is out of range: 0 <= temperature <= 1"
            raise bad_value("temperature", self.temperature, problem)
        check_routing(self.cache_salt, self.data_parallel_rank, self.priority)
        self._check_stops()
        self._check_thinking()

    def _check_stops(self) -> None:
        stops = self.stop_sequences or []
        check_length("stop_sequences", stops, "texts", MAX_STOP_STRINGS)
        for index, text in enumerate(stops):
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                problem = f"has {len(text)} characters; 1 to {MAX_STOP_CHARS} are allowed"
                raise bad_value(f"stop_sequences[{index}]", text, problem)
        check_total_chars("stop_sequences", stops, MAX_STOP_CHARS_TOTAL)

    def _check_thinking(self) -> None:
        thinking, choice = self.thinking, self.tool_choice
        if thinking is None:
            return
        budget = thinking.budget_tokens
        if (thinking.type == "enabled") != (budget is not None):
            raise bad_value(
                "thinking.budget_tokens",
                budget,
                f"does not match thinking.type={thinking.type!r}: type 'enabled' needs it, and "
                "the other types do not allow it",
            )
        if budget is not None and not MIN_THINKING_TOKENS <= budget < self.max_tokens:
            raise bad_value(
                "thinking.budget_tokens",
                budget,
                f"must be at least {MIN_THINKING_TOKENS} and below max_tokens="
                f"{shown(self.max_tokens)}",
            )
        if thinking.type == "enabled" and choice is not None and choice.type in ("any", "tool"):
            raise BadRequest(
                f"tool_choice.type={choice.type!r} and thinking.type='enabled' cannot be "
                "combined, as in Anthropic's API; send tool_choice.type='auto', or leave out "
                "thinking",
                "thinking",
            )
