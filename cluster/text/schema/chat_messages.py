"""The messages of a conversation, and the tools that an answer may call."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Literal

import msgspec

from swell.cluster.text.errors import BadRequest, Field, bad_value
from swell.cluster.text.json_types import JsonObject, JsonSchema
from swell.cluster.text.params.validate_params import check_length
from swell.cluster.text.schema.request_body import HistoryPart, NotServed, RequestBody
from swell.configs.error_text import shown

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that every chat template is assumed to support; the template must support any other
role."""
MAX_OWN_ROLES = 8
"""Maximum number of other roles in a conversation: each is checked by rendering the template."""
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}\Z")
_NAME_RULE = "1 to 64 letters, digits, '_', '-' or '.'"


class ContentPart(HistoryPart, kw_only=True):
    """One part of a message; parts other than text are refused by name."""

    type: str
    text: str | None = None
    image_url: NotServed = None
    input_audio: NotServed = None
    audio_url: NotServed = None
    video_url: NotServed = None
    file: NotServed = None
    refusal: str | None = None
    cache_control: Any = None
    """Accepted without effect; prefixes are always shared."""


class FunctionCall(HistoryPart, kw_only=True):
    name: str
    arguments: str
    """JSON as text. It was written by a model, so it may be incomplete or invalid."""


class MessageToolCall(HistoryPart, kw_only=True):
    """A call that an earlier answer made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(HistoryPart, kw_only=True):
    role: str
    """One of `ROLES`, or one that the chat template supports."""
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    """The id of the call that a message of role `tool` answers."""
    tool_calls: list[MessageToolCall] | None = None
    reasoning_content: str | None = None
    """The reasoning of an earlier answer; passed to the chat template."""
    reasoning: Any = None
    """The same under vLLM's newer name, if it is a text."""
    function_call: FunctionCall | None = None
    """The only call of a message, as in OpenAI's API before `tool_calls`; a message of role
    `function` has its result."""

    refusal: str | None = None
    audio: NotServed = None

    def check_at(self, path: str) -> None:
        if self.audio is not None:
            self.refuse_unsupported(path + ".")
        if self.role not in ROLES and not _NAME.match(self.role):
            rule = (
                f"must be one of {', '.join(ROLES)}, or another role that the chat template "
                f"knows: {_NAME_RULE}"
            )
            raise bad_value(f"{path}.role", self.role, rule)
        if self.tool_calls or self.function_call is not None:
            self._check_calls(path)
        if self.tool_call_id == "":
            raise bad_value(f"{path}.tool_call_id", "", "must be the id of a call, and not empty")
        if self.content is None and self.role != "assistant":
            raise BadRequest(
                f"{path}.content is missing: a message with role {self.role!r} needs text",
                f"{path}.content",
            )
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                _check_part(part, f"{path}.content[{index}]")

    def _check_calls(self, path: str) -> None:
        for name in ("tool_calls", "function_call"):
            if getattr(self, name) and self.role != "assistant":
                raise BadRequest(
                    f"{path}.{name} is not allowed in a message with role {self.role!r}; only "
                    "'assistant' calls tools",
                    f"{path}.{name}",
                )
        for index, call in enumerate(self.tool_calls or ()):
            check_named(call.id, f"{path}.tool_calls[{index}].id")
            check_named(call.function.name, f"{path}.tool_calls[{index}].function.name")
        if self.function_call is not None:
            check_named(self.function_call.name, f"{path}.function_call.name")
            if self.tool_calls:
                raise BadRequest(
                    [
                        f"{path}.function_call and ",
                        Field(f"{path}.tool_calls"),
                        " are both set; send only tool_calls",
                    ],
                    f"{path}.function_call",
                )

    @property
    def thoughts(self) -> str | None:
        """The reasoning of an earlier answer, under either name."""
        if self.reasoning_content is None and isinstance(self.reasoning, str):
            return self.reasoning
        return self.reasoning_content

    @property
    def text(self) -> str:
        """The content as one text, with each part on a separate line."""
        if isinstance(self.content, list):
            return "\n".join(part.text or part.refusal or "" for part in self.content)
        return self.content or ""


def check_named(value: str, path: str) -> None:
    """Raises `BadRequest` if an id or a name of a call is empty: its result and the template refer
    to it."""
    if not value:
        raise bad_value(path, value, "is empty; at least one character is needed")


def missing_field(path: str) -> BadRequest:
    return BadRequest(["the required field '", Field(path), "' is missing"], path, "missing_field")


def _check_part(part: ContentPart, path: str) -> None:
    if part.type not in TEXT_PARTS:
        rule = "is not supported; only 'text' parts are"
        raise bad_value(f"{path}.type", part.type, rule, "unsupported_value")
    name = "refusal" if part.type == "refusal" else "text"
    if getattr(part, name) is None:
        raise missing_field(f"{path}.{name}")
    part.refuse_unsupported(path + ".")


def check_messages(messages: list[ChatMessage]) -> None:
    """Checks messages, and converts calls of the older API to the newer form."""
    if not messages:
        raise bad_value("messages", messages, "must have at least one message")
    for index, message in enumerate(messages):
        message.check_at(f"messages[{index}]")
    own = {message.role for message in messages} - {*ROLES, "function"}
    if len(own) > MAX_OWN_ROLES:
        raise BadRequest(
            f"messages have {len(own)} roles besides {', '.join(ROLES)}; at most {MAX_OWN_ROLES} "
            "are allowed",
            "messages",
        )
    _upgrade_function_call(messages)


def _upgrade_function_call(messages: list[ChatMessage]) -> None:
    """Converts `function_call` and role `function` to `tool_calls` and role `tool`. A result
    belongs to the last call with its name."""
    called: dict[str, str] = {}
    for index, message in enumerate(messages):
        if message.function_call is not None:
            # Nine letters and digits: some templates require ids of this form.
            id = f"call{index:05d}"
            message.tool_calls = [MessageToolCall(id=id, function=message.function_call)]
            called[message.function_call.name] = id
            message.function_call = None
        elif message.role == "function":
            name = message.name or ""
            if name not in called:
                rule = "of role 'function' is not the name of an earlier function_call"
                raise bad_value(f"messages[{index}].name", message.name, rule)
            message.role, message.tool_call_id = "tool", called[name]


class FunctionDefinition(HistoryPart, kw_only=True):
    name: str
    description: str | None = None
    parameters: JsonSchema | None = None
    """JSON schema of the arguments, which are an object; None means no arguments."""
    strict: bool | None = None
    """Whether the schema is enforced even if the model itself chooses to call."""


class ToolDefinition(HistoryPart, kw_only=True, dict=True):
    type: str
    function: FunctionDefinition | None = None
    custom: NotServed = None
    cache_control: Any = None

    @cached_property
    def as_sent(self) -> JsonObject:
        """The tool in the form that the chat template sees: as its client wrote it (`keep_tools`)
        or, with another API, its known fields."""
        assert self.function is not None, "tools were checked"
        known = {
            name: getattr(self.function, name) for name in ("name", "description", "parameters")
        }
        function = {name: value for name, value in known.items() if value is not None}
        return {"type": self.type, "function": function}

    def keep_sent(self, sent: JsonObject) -> None:
        """Keeps the tool as its client wrote it."""
        self.as_sent = {key: value for key, value in sent.items() if key != "cache_control"}


def function_tool(
    name: str, description: str | None, parameters: JsonObject | None, strict: bool | None
) -> ToolDefinition:
    """Returns a tool definition for a tool of another API."""
    function = FunctionDefinition(
        name=name, description=description, parameters=parameters, strict=strict
    )
    return ToolDefinition(type="function", function=function)


class _SentTools(msgspec.Struct):
    tools: list[dict[str, Any]] | None = None


_SENT_TOOLS = msgspec.json.Decoder(_SentTools)


def keep_tools(tools: list[ToolDefinition] | None, body: bytes) -> None:
    """Keeps the tools of a body as they were sent: with untyped fields, and with the fields in
    their order."""
    if tools:
        for tool, sent in zip(tools, _SENT_TOOLS.decode(body).tools or (), strict=True):
            tool.keep_sent(sent)


class FunctionName(RequestBody, kw_only=True):
    name: str


class AllowedTool(RequestBody, kw_only=True):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(RequestBody, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class NamedToolChoice(RequestBody, kw_only=True, omit_defaults=True):
    """The tool to call, or the subset of the tools that may be called."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    def check(self) -> None:
        """Raises `BadRequest` unless only the field named like the type is set."""
        for name in ("function", "allowed_tools"):
            if (getattr(self, name) is not None) != (self.type == name):
                raise BadRequest(
                    f"tool_choice.type={self.type!r} needs tool_choice.{self.type} and no other "
                    "field",
                    f"tool_choice.{name}",
                )


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CallRules(msgspec.Struct, frozen=True):
    """The requirements of a tool choice for an answer."""

    required: bool = False
    single: bool = False
    """Whether exactly one call of the named tool is allowed."""
    names: frozenset[str] | None = None
    """Tools that may be called; None for all of them."""


def call_rules(choice: ToolChoice | None) -> CallRules:
    """Returns the rules of a validated choice other than `none`."""
    if not isinstance(choice, NamedToolChoice):
        return CallRules(required=choice == "required")
    if choice.allowed_tools is not None:
        names = frozenset(tool.function.name for tool in choice.allowed_tools.tools)
        return CallRules(required=choice.allowed_tools.mode == "required", names=names)
    assert choice.function is not None, "the choice was checked"
    return CallRules(required=True, single=True, names=frozenset([choice.function.name]))


def check_tools(tools: list[ToolDefinition] | None, choice: ToolChoice | None) -> None:
    """Checks the tools, and that the choice fits them."""
    names: list[str] = []
    check_length("tools", tools or (), "tools", MAX_TOOLS)
    for index, tool in enumerate(tools or ()):
        names.append(_check_tool(tool, f"tools[{index}]", names))
    if choice is None or choice in ("none", "auto"):
        return
    if not names:
        sent = msgspec.to_builtins(choice)
        raise bad_value("tool_choice", sent, "needs tools, but tools is empty")
    if not isinstance(choice, NamedToolChoice):
        return
    choice.check()
    chosen = call_rules(choice).names
    assert chosen is not None, "a tool choice that is an object names tools"
    if not chosen:
        rule = "allows no tool; send tool_choice='none'"
        raise bad_value("tool_choice.allowed_tools.tools", [], rule)
    for name in sorted(chosen.difference(names)):
        raise BadRequest(
            f"tool_choice names {shown(name)}, which is not in tools; available: {shown(names)}",
            "tool_choice",
        )


def _check_tool(tool: ToolDefinition, path: str, before: list[str]) -> str:
    """Checks a tool; returns its name."""
    if tool.type != "function":
        rule = "is not supported; only 'function' is"
        raise bad_value(f"{path}.type", tool.type, rule, "unsupported_value")
    tool.refuse_unsupported(path + ".")
    if tool.function is None:
        raise missing_field(f"{path}.function")
    name = tool.function.name
    if not _NAME.match(name):
        raise bad_value(f"{path}.function.name", name, f"must be {_NAME_RULE}")
    if name in before:
        raise bad_value(
            f"{path}.function.name",
            name,
            "is also the name of an earlier tool; give each tool its own name",
        )
    return name
