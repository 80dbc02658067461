"""The formats of reasoning and tool calls of one model, applied to single requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.grammar.lark_compiler import compile_lark
from swell.cluster.text.grammar.structured_output import (
    MAX_SEARCH_S,
    compile_grammar,
    compile_schema,
    grammar_fragment,
)
from swell.cluster.text.json_grammar.schema_keywords import SchemaKeywords
from swell.cluster.text.json_grammar.schema_nodes import SchemaError
from swell.cluster.text.params.sampling_params import StructuredOutputs
from swell.cluster.text.parsers import (
    make_parser,
    message_format,
    reasoning_format,
    tool_format,
)
from swell.cluster.text.parsers.answer_grammar import (
    MessageGrammar,
    ReasoningGrammar,
    answer,
    unpadded,
)
from swell.cluster.text.parsers.base import Parser
from swell.cluster.text.parsers.constrained import (
    ConstrainedCallsParser,
    RequiredCallsParser,
    StructuredOrCallsParser,
)
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.detection import detect_reasoning, detect_tools
from swell.cluster.text.parsers.grammar import GrammarBuilder, parameters_of
from swell.cluster.text.prompt.generation_request import Conversation, GenerationRequest
from swell.cluster.text.schema.chat_messages import CallRules, ToolDefinition, call_rules
from swell.configs.schema import ConfigError, ServeConfig
from swell.worker.sampler_wire import Grammar


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of one answer."""

    keeps_special_tokens: bool
    """Whether a marker is a special token, so that these must stay in the text."""
    make_parser: Callable[[], Parser]
    make_content_parser: Callable[[], Parser] | None = None
    """Creates the same parser without random ids of calls, for use if only the content of its
    deltas is read. None if all text is content."""
    grammar: Callable[[], Grammar] | None
    """Compiles the grammar of the answer; raises BadRequest. None if the answer is not
    constrained."""
    keywords: SchemaKeywords
    """Converts the schemas of the structured output and of tools, when the grammar is compiled."""


class ModelFormats:
    """The formats of one model: those named by `serve.tool_parser` and `serve.reasoning_parser`, or
    those detected from its chat template. Raises ConfigError for an unknown name."""

    def __init__(self, tokenizer: Any, chat_template: str, config: ServeConfig) -> None:
        self._tools = _configured_or_detected(config.tool_parser, detect_tools(chat_template))
        guessed = detect_reasoning(chat_template)
        self._reasoning = _configured_or_detected(config.reasoning_parser, guessed)
        if self._reasoning == guessed == "think-open":
            # With this template each prompt decides whether the answer begins inside the reasoning.
            self._reasoning = "think"
        self._ignores_keywords = config.schema_keywords == "ignore"
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {str(token): id for id, token in added.items()}
        """Maps text to id for tokens that the tokenizer finds before it splits a text into words:
        special tokens, and others that models write as markers."""
        self._special = {str(token) for token in added.values() if token.special}
        """Texts of the tokens that detokenization may skip."""
        try:
            make_parser(self._tools, self._reasoning)
            self._message_format = message_format(self._tools, self._reasoning)
        except ValueError as error:
            raise ConfigError(f"serve.tool_parser or serve.reasoning_parser: {error}") from None

    def check_tools(self, tools: Sequence[ToolDefinition]) -> None:
        """Raises BadRequest if the model cannot call tools."""
        if tools and self._tools is None:
            raise BadRequest(
                "tools: the model's chat template has no known format of tool calls; set "
                "serve.tool_parser to the name of a format, or send tool_choice='none'",
                "tools",
                "unsupported_value",
            )

    def of(
        self, request: GenerationRequest, conversation: Conversation, prompt: str
    ) -> AnswerFormat:
        """Returns the format of the answer. `conversation` is the prompt of `request`, whose tools
        were checked. `prompt` is the end of its text, which may have begun the answer's
        reasoning."""
        tools = conversation.template.tools
        structured_outputs = request.params.structured_outputs
        calls = _call_rules(conversation, structured=structured_outputs is not None)
        form = None if calls and calls.required else structured_outputs
        reasoning = self._reasoning_grammar(conversation, form, prompt)
        constrained = calls is not None or form is not None
        name = self._tools if tools else None
        kind = self._reasoning
        written = self._message_format
        if constrained and reasoning is None and written is None:
            kind = None
        wrap_calls = StructuredOrCallsParser if calls and form else None
        request_tools = [_tool(tool) for tool in tools]
        make_id = partial(tool_format(name).random_id, request.random) if name else None
        start_markers: tuple[str, ...] = ()
        if name and calls and not (form and form.grammar):
            start_markers = tool_format(name).start_markers

        def make(make_id: Callable[[], str] | None) -> Parser:
            parser = make_parser(
                name,
                kind,
                make_id,
                request_tools=request_tools,
                prompt=prompt,
                wrap_calls=wrap_calls,
                constrained=constrained,
            )
            if calls and calls.required:
                return RequiredCallsParser(parser)
            return ConstrainedCallsParser(parser, start_markers) if start_markers else parser

        limited = reasoning is not None and reasoning.budget is not None
        messages = written.messages(prompt, self._added) if written else None
        keywords = SchemaKeywords(ignore=self._ignores_keywords)
        grammar = partial(
            self._compile,
            keywords,
            request.structured_outputs_field,
            request_tools,
            calls,
            form,
            reasoning,
            messages,
        )
        free = make_parser(name, self._reasoning)
        return AnswerFormat(
            keeps_special_tokens=free.keeps_special_tokens
            or any(token in marker for marker in free.markers for token in self._special),
            make_parser=partial(make, make_id),
            make_content_parser=partial(make, _no_id) if name or kind or written else None,
            grammar=grammar if constrained or limited else None,
            keywords=keywords,
        )

    def _reasoning_grammar(
        self, conversation: Conversation, form: StructuredOutputs | None, prompt: str
    ) -> ReasoningGrammar | None:
        """Returns the reasoning that may precede the answer; None if none is parsed."""
        if self._reasoning is None:
            return None
        kind = reasoning_format(self._reasoning)
        begun = kind.opened_by_prompt(prompt)
        if not begun and (
            conversation.template.continue_final_message or kind.closed_by_prompt(prompt)
        ):
            return None
        own = form.grammar if form else None
        if not begun and own is not None and kind.start_token in own:
            return None  # the parser could not distinguish such a text from reasoning
        return ReasoningGrammar(
            opening=kind.start_token,
            closing=kind.end_token,
            begun=begun,
            padding=kind.padding,
            budget=_budget(conversation),
        )

    def _compile(
        self,
        keywords: SchemaKeywords,
        param: str | None,
        tools: list[Tool],
        rules: CallRules | None,
        form: StructuredOutputs | None,
        reasoning: ReasoningGrammar | None,
        messages: MessageGrammar | None,
    ) -> Grammar:
        """Compiles the grammar of an answer. `param` names the field of `form`; `tools` are those
        that the model sees."""
        if form is not None:
            alone = compile_grammar(form, param, keywords)  # so that an error names it
            if rules is None and reasoning is None and messages is None:
                return alone
            if reasoning is not None:
                _check_after_reasoning(reasoning, form, param)
        wanted: list[Tool] = []
        kind = tool_format(self._tools) if tools and self._tools else None
        calls = None
        if kind is not None and rules is not None:
            names = rules.names
            try:
                wanted = [
                    _cleaned_tool(tool, keywords)
                    for tool in tools
                    if names is None or tool.name in names
                ]
                builder = GrammarBuilder(wanted, not rules.single, self._added)
                calls = kind.call_grammar(builder)
            except ValueError as error:
                raise BadRequest(f"tools: {error}", "tools") from None
        try:
            lark = answer(
                calls,
                special=self._added,
                required=rules is not None and rules.required,
                form=grammar_fragment(form, param, keywords) if form else None,
                reasoning=reasoning,
                start_markers=[one.strip() for one in kind.start_markers] if kind else (),
                messages=messages,
            )
        except ValueError as error:
            field = "thinking_token_budget"
            raise BadRequest(f"{field}: {error}", field, "unsupported_value") from None
        try:
            return compile_lark(lark, "tools" if calls else param or "structured_outputs")
        except BadRequest:
            _check_each_tool(wanted)
            raise


def _no_id() -> str:
    return ""


def _check_after_reasoning(
    reasoning: ReasoningGrammar, form: StructuredOutputs, param: str | None
) -> None:
    """Raises BadRequest for a form that cannot follow reasoning."""
    behind = unpadded(grammar_fragment(form, param), reasoning.padding)
    if not behind.terminal:
        return
    param = param or "structured_outputs"
    try:
        compile_lark(behind.to_grammar(), param)
    except BadRequest:
        raise BadRequest(
            f"{param} only allows texts that begin with {reasoning.padding!r}, which is read as "
            "part of the end of the reasoning; leave it out, or send reasoning_effort='none'",
            param,
        ) from None


def _call_rules(conversation: Conversation, *, structured: bool) -> CallRules | None:
    """Returns the rules of the calls in the answer; None if there are no tools, or if calls and
    text are not constrained. `structured` means that the request has a structured output."""
    tools = conversation.template.tools
    if not tools:
        return None
    rules = call_rules(conversation.tool_choice)
    strict = any(tool.function and tool.function.strict for tool in tools)
    single = rules.single or not conversation.parallel_tool_calls
    constrained = rules.required or rules.names is not None or strict or single or structured
    return msgspec.structs.replace(rules, single=single) if constrained else None


def _budget(conversation: Conversation) -> int | None:
    """Returns the maximum number of reasoning tokens; None without a limit."""
    budget = conversation.thinking_token_budget
    if budget is None and conversation.template.variables.get("reasoning_effort") == "none":
        return 0
    return None if budget == -1 else budget


def _tool(tool: ToolDefinition) -> Tool:
    function = tool.function
    assert function is not None, "tools were checked"
    return Tool(function.name, function.description or "", function.parameters or {})


def _configured_or_detected(wanted: str, guessed: str | None) -> str | None:
    if wanted == "auto":
        return guessed
    return None if wanted == "none" else wanted


def _cleaned_tool(tool: Tool, keywords: SchemaKeywords) -> Tool:
    """Returns the same tool with parameters in keywords that grammars support. Raises ValueError
    for others."""
    if not tool.parameters:
        return tool
    try:
        cleaned = keywords.clean(tool.parameters, f"tools[{tool.name}]")
    except SchemaError as error:
        raise ValueError(f"schema of tool {tool.name!r} {error}") from None
    return msgspec.structs.replace(tool, parameters=cleaned or {"type": "object"})


def _check_each_tool(tools: list[Tool]) -> None:
    """Raises BadRequest for the first tool whose schema, by itself, does not compile."""
    end_s = time.monotonic() + MAX_SEARCH_S
    for tool in tools:
        if time.monotonic() > end_s:
            return
        compile_schema(parameters_of(tool), f"tools: schema of tool {tool.name!r}", "tools")
