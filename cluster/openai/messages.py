"""The messages of a conversation, and the tools that an answer may call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from swell.cluster.openai.base import RequestBody
from swell.cluster.params import BadRequest, shown

Role = Literal["system", "developer", "user", "assistant", "tool"]

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}\Z")


class ContentPart(RequestBody, kw_only=True):
    """One part of a message; parts other than text are refused by name."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None
    refusal: str | None = None
    cache_control: Any = None
    """Accepted; prefixes are always shared."""

    NOT_SERVED = dict.fromkeys(("image_url", "input_audio", "audio_url", "video_url", "file"), ())


class FunctionCall(RequestBody, kw_only=True):
    name: str
    arguments: str
    """JSON, as text."""


class MessageToolCall(RequestBody, kw_only=True):
    """A call that an earlier answer made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(RequestBody, kw_only=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    """Of a message of role `tool`: the call that it answers."""
    tool_calls: list[MessageToolCall] | None = None
    reasoning_content: str | None = None
    """What an earlier answer thought; handed to the chat template."""

    refusal: str | None = None
    annotations: list[Any] | None = None
    provider_specific_fields: Any = None
    """Accepted; LiteLLM writes it into every answer, which comes back with the conversation."""
    function_call: Any = None
    audio: Any = None

    NOT_SERVED = {"function_call": (), "audio": ()}

    def check_at(self, path: str) -> None:
        self.refuse_unsupported(path + ".")
        if self.tool_calls and self.role != "assistant":
            raise BadRequest(
                f"{path}.tool_calls stands in a message of role {self.role!r}; only 'assistant' "
                "calls tools",
                f"{path}.tool_calls",
            )
        for index, call in enumerate(self.tool_calls or ()):
            _check_arguments(call, f"{path}.tool_calls[{index}].function.arguments")
        if self.content is None and self.role != "assistant":
            raise BadRequest(
                f"{path}.content is missing: a message of role {self.role!r} needs text",
                f"{path}.content",
            )
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                _check_part(part, f"{path}.content[{index}]")

    @property
    def text(self) -> str:
        """The content as one text; parts stand on lines of their own."""
        if isinstance(self.content, list):
            return "\n".join(part.text or part.refusal or "" for part in self.content)
        return self.content or ""


def _check_arguments(call: MessageToolCall, path: str) -> None:
    """Templates write the arguments as an object."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except msgspec.DecodeError as error:
        raise BadRequest(
            f"{path}={shown(call.function.arguments)} is not JSON: {error}", path
        ) from None
    if not isinstance(arguments, dict):
        raise BadRequest(
            f"{path}={shown(call.function.arguments)} must be a JSON object, as text", path
        )


def _check_part(part: ContentPart, path: str) -> None:
    if part.type not in ("text", "refusal"):
        raise BadRequest(
            f"{path}.type={shown(part.type)} is not supported; only 'text' parts are",
            f"{path}.type",
            "unsupported_value",
        )
    if getattr(part, part.type) is None:
        raise BadRequest(
            f"the required field '{path}.{part.type}' is missing",
            f"{path}.{part.type}",
            "missing_field",
        )
    part.refuse_unsupported(path + ".")


def check_messages(messages: list[ChatMessage]) -> None:
    if not messages:
        raise BadRequest("messages=[] must hold at least one message", "messages")
    for index, message in enumerate(messages):
        message.check_at(f"messages[{index}]")


class FunctionDefinition(RequestBody, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None: no arguments."""
    strict: bool | None = None
    """Hold the schema also where the model itself chooses to call."""


class ToolDefinition(RequestBody, kw_only=True):
    type: str
    function: FunctionDefinition | None = None
    custom: Any = None
    cache_control: Any = None

    NOT_SERVED = {"custom": ()}


class FunctionName(RequestBody, kw_only=True):
    name: str


class AllowedTool(RequestBody, kw_only=True):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(RequestBody, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class NamedToolChoice(RequestBody, kw_only=True, omit_defaults=True):
    """The tool to call; or, of all that the model is shown, those that it may call."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    def check(self) -> None:
        """Each type has the field of its name, and only this one."""
        for name in ("function", "allowed_tools"):
            if (getattr(self, name) is not None) != (self.type == name):
                raise BadRequest(
                    f"tool_choice.type={self.type!r} needs tool_choice.{self.type}, and no other "
                    "field beside it",
                    f"tool_choice.{name}",
                )


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CallRules(msgspec.Struct, frozen=True):
    """What a choice among tools asks of an answer."""

    required: bool = False
    single: bool = False
    """The one tool that is named is called once."""
    names: frozenset[str] | None = None
    """Tools that may be called; None: all of them."""


def call_rules(choice: ToolChoice | None) -> CallRules:
    """Of a checked choice that is not `none`."""
    if not isinstance(choice, NamedToolChoice):
        return CallRules(required=choice == "required")
    if choice.allowed_tools is not None:
        names = frozenset(tool.function.name for tool in choice.allowed_tools.tools)
        return CallRules(required=choice.allowed_tools.mode == "required", names=names)
    assert choice.function is not None, "the choice was checked"
    return CallRules(required=True, single=True, names=frozenset([choice.function.name]))


def check_count(tools: Sequence[object] | None) -> None:
    if tools is not None and len(tools) > MAX_TOOLS:
        raise BadRequest(
            f"tools holds {len(tools)} tools; at most {MAX_TOOLS} are allowed", "tools"
        )


def check_tools(tools: list[ToolDefinition] | None, choice: ToolChoice | None) -> None:
    """The rules between tools and the choice among them."""
    names: list[str] = []
    check_count(tools)
    for index, tool in enumerate(tools or ()):
        names.append(_check_tool(tool, f"tools[{index}]", names))
    if choice is None or choice in ("none", "auto"):
        return
    if not names:
        raise BadRequest(
            f"tool_choice={shown(msgspec.to_builtins(choice))} needs tools, and tools is empty",
            "tool_choice",
        )
    if not isinstance(choice, NamedToolChoice):
        return
    choice.check()
    chosen = call_rules(choice).names
    assert chosen is not None, "an object names tools"
    if not chosen:
        raise BadRequest(
            "tool_choice.allowed_tools.tools=[] allows no tool; send tool_choice='none'",
            "tool_choice.allowed_tools.tools",
        )
    for name in sorted(chosen.difference(names)):
        raise BadRequest(
            f"tool_choice names {shown(name)}, which tools does not hold; they are {shown(names)}",
            "tool_choice",
        )


def _check_tool(tool: ToolDefinition, path: str, before: list[str]) -> str:
    """The tool's name."""
    if tool.type != "function":
        raise BadRequest(
            f"{path}.type={shown(tool.type)} is not supported; only 'function' is",
            f"{path}.type",
            "unsupported_value",
        )
    tool.refuse_unsupported(path + ".")
    if tool.function is None:
        raise BadRequest(
            f"the required field '{path}.function' is missing", f"{path}.function", "missing_field"
        )
    name = tool.function.name
    if not _NAME.match(name):
        raise BadRequest(
            f"{path}.function.name={shown(name)} must be 1 to 64 letters, digits, '_', '-' or '.'",
            f"{path}.function.name",
        )
    if name in before:
        raise BadRequest(
            f"{path}.function.name={shown(name)} is the name of an earlier tool too",
            f"{path}.function.name",
        )
    return name
