"""How one model marks reasoning and tool calls, and what that means for one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from swell.cluster.openai.chat import ChatCompletionRequest
from swell.cluster.openai.messages import NamedToolChoice, ToolDefinition
from swell.cluster.params import BadRequest
from swell.cluster.parsers import detect_reasoning, detect_tools, make_parser, tool_format
from swell.cluster.parsers.base import Parser
from swell.cluster.parsers.grammar import answer
from swell.cluster.parsers.parts import Tool
from swell.cluster.parsers.reasoning import OPEN
from swell.cluster.structured import compile_lark
from swell.configs.schema import ConfigError, ServeConfig
from swell.worker.sample.wire import Grammar


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request."""

    tools: list[ToolDefinition]
    """Those that the model is shown."""
    make_parser: Callable[[str], Parser]
    """Makes what reads one answer, from the end of the prompt's text."""
    keeps_special_tokens: bool
    """A marker is a special token, so these must stay in the text."""
    grammar: Callable[[], Grammar] | None
    """Compiles the form that tool calls give the answer; raises BadRequest."""


class ModelFormats:
    """Of one model: as `serve.tool_parser` and `serve.reasoning_parser` say, or as its chat
    template lets guess. Raises ConfigError for a name that is unknown."""

    def __init__(self, tokenizer: Any, chat_template: str, config: ServeConfig) -> None:
        self._tools = _chosen(config.tool_parser, detect_tools(chat_template))
        self._reasoning = _chosen(config.reasoning_parser, detect_reasoning(chat_template))
        self._special = special_tokens(tokenizer)
        try:
            make_parser(self._tools, self._reasoning)
        except ValueError as error:
            raise ConfigError(f"serve.tool_parser or serve.reasoning_parser: {error}") from None

    def of(self, body: ChatCompletionRequest) -> AnswerFormat:
        tools = body.tools if body.tools and body.tool_choice != "none" else []
        if tools and self._tools is None:
            raise BadRequest(
                "tools: the model's chat template tells no format of tool calls that is known; "
                "set serve.tool_parser to one, or send tool_choice='none'",
                "tools",
                "unsupported_value",
            )
        name = self._tools if tools else None
        grammar = self._grammar(body, tools)
        # What a grammar forces begins at once: there is no room for reasoning.
        reasoning = None if grammar or body.form() else self._reasoning
        parser = make_parser(name, reasoning)
        shown = [_tool(tool) for tool in tools]
        return AnswerFormat(
            tools=tools,
            make_parser=lambda prompt: make_parser(
                name, reasoning and reasoning_in(prompt), shown=shown
            ),
            keeps_special_tokens=parser.keeps_special_tokens
            or any(marker in self._special for marker in parser.markers),
            grammar=grammar,
        )

    def _grammar(
        self, body: ChatCompletionRequest, tools: list[ToolDefinition]
    ) -> Callable[[], Grammar] | None:
        """Where the request asks for calls, for one at most, or for arguments as the schema has
        them; otherwise the model is free."""
        choice = body.tool_choice
        named = isinstance(choice, NamedToolChoice)
        strict = any(tool.function and tool.function.strict for tool in tools)
        single = body.parallel_tool_calls is False
        if not tools or not (named or choice == "required" or strict or single):
            return None
        if isinstance(choice, NamedToolChoice):
            tools = [t for t in tools if t.function and t.function.name == choice.function.name]
        assert self._tools is not None, "tools were refused"
        kind = tool_format(self._tools)

        def compile_calls() -> Grammar:
            try:
                calls = kind.calls(
                    [_tool(tool) for tool in tools],
                    parallel=not (named or single),
                    special=self._special,
                )
            except ValueError as error:
                raise BadRequest(f"tools: {error}", "tools") from None
            lark = answer(calls, special=self._special, required=named or choice == "required")
            return compile_lark(lark, "tools")

        return compile_calls


def reasoning_in(prompt: str) -> str:
    """The form of reasoning behind a prompt: a template may open it, and may be asked not to."""
    return "think-open" if prompt.rstrip().endswith(OPEN) else "think"


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Text -> id of the tokens that are no text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): id for id, token in added.items() if token.special}


def _tool(tool: ToolDefinition) -> Tool:
    function = tool.function
    assert function is not None, "tools were checked"
    return Tool(function.name, function.description or "", function.parameters or {})


def _chosen(wanted: str, guessed: str | None) -> str | None:
    if wanted == "auto":
        return guessed
    return None if wanted == "none" else wanted
