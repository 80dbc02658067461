"""Renders a conversation to the text that the model reads, with a chat template."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec

from swell.cluster.text.errors import BadRequest, Field
from swell.cluster.text.prompt.control_tokens import ControlTokens, Segment
from swell.cluster.text.prompt.history_form import (
    PROBE_CALL,
    HistoryForm,
    TemplateValues,
    find_form,
)
from swell.cluster.text.prompt.template_texts import Change, changed, own_segments, texts_of
from swell.cluster.text.schema.chat_messages import ROLES, ChatMessage, ToolDefinition
from swell.configs.error_text import shown
from swell.configs.files.bounded_files import MAX_CONFIG_BYTES, read_file
from swell.configs.schema import ConfigError

_RESERVED_VARIABLES = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
"""Names that `chat_template_kwargs` must not set."""


THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables that switch reasoning on or off: a template reads one or the other."""
_PROBE = "probe 17"
"""A text that a template writes only if it reads the content of a message."""
_PROBE_TOOL: TemplateValues = {
    "type": "function",
    "function": {
        "name": PROBE_CALL,
        "description": "",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
_MAX_REASON_CHARS = 500
"""Limit on the length of a template's error message: it may repeat the conversation."""


def read_template(path: str | None) -> str | None:
    """Reads the chat template file of `serve.chat_template`; returns None if it is not set. Raises
    ConfigError."""
    if path is None:
        return None
    try:
        return read_file(Path(path), MAX_CONFIG_BYTES).decode()
    except OSError as error:
        why = error.strerror
    except UnicodeError as error:
        why = str(error)
    raise ConfigError(f"serve.chat_template={path!r} cannot be read: {why}")


class TemplateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for the rendering of a conversation."""

    tools: Sequence[ToolDefinition] = ()
    add_generation_prompt: bool = True
    """Whether the text ends with the beginning of an assistant's answer."""
    continue_final_message: bool = False
    """Whether the text ends within the last message, which the answer continues."""
    template: str | None = None
    """A template to use instead of the model's."""
    documents: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = {}
    """Variables for the template's own use, such as `enable_thinking`."""


class ChatTemplate:
    """The chat template of one model; `override`, if given, replaces the tokenizer's."""

    def __init__(self, tokenizer: Any, model_name: str, override: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._override = override
        self.control_tokens = lru_cache(maxsize=8)(partial(ControlTokens, tokenizer))
        """Returns the control tokens of the tokenizer with a template."""
        self._reads_parts = lru_cache(maxsize=8)(partial(_reads_parts, tokenizer))
        self._form = lru_cache(maxsize=8)(self._find_form)

    @property
    def text(self) -> str:
        """The template's source; empty without a template. If there are several named ones, the one
        for tools."""
        template = self._override or self._tokenizer.chat_template or ""
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default") or ""
        return str(template)

    @cached_property
    def _reads_only_parts(self) -> bool:
        return _reads_parts(self._tokenizer, self.text)

    def render(self, messages: Sequence[ChatMessage], options: TemplateOptions) -> str:
        """Renders a conversation. Raises `BadRequest` with the template's error message."""
        if not self.text and options.template is None:
            raise BadRequest(
                f"the model {self._model_name!r} has no chat template: use /v1/completions, or set "
                "serve.chat_template to a file with the template of its family",
                "messages",
                "no_chat_template",
            )
        taken = sorted(_RESERVED_VARIABLES & options.variables.keys())
        if taken:
            raise BadRequest(
                f"chat_template_kwargs may not set {shown(taken[0])}; send it as a field of the "
                "request",
                "chat_template_kwargs",
            )
        if options.documents and "documents" not in (options.template or self.text):
            raise BadRequest(
                "documents: the model's chat template does not use documents; put them into a "
                "message",
                "documents",
                "unsupported_value",
            )
        text = self._render_or_refuse(messages, options)
        for role in dict.fromkeys(message.role for message in messages):
            if role not in ROLES:
                self._check_role(role, messages, options, text)
        return text

    def own_segments(
        self, text: str, messages: Sequence[ChatMessage], options: TemplateOptions
    ) -> tuple[ControlTokens, list[Segment]] | None:
        """Splits `text`, which `render` returned, into segments in which only control tokens that
        the template itself wrote are control. Returns None if that holds for all control tokens.
        Raises `BadRequest`."""
        control = self.control_tokens(options.template or self.text)
        inputs = (
            [*map(_texts_of_message, self._message_dicts(messages, options))],
            [tool.as_sent for tool in options.tools],
            options.documents,
            _text_variables(options.variables),
        )
        own = own_segments(
            text,
            list(texts_of(inputs)),
            control,
            lambda change: self._render_or_refuse(messages, options, change),
        )
        return None if own is None else (control, own)

    def _check_role(
        self, role: str, messages: Sequence[ChatMessage], options: TemplateOptions, text: str
    ) -> None:
        """Raises `BadRequest` if the template silently leaves out messages of a role that it does
        not know: the text is then the same for any content of these messages."""
        others = [
            msgspec.structs.replace(message, content=message.text + "?")
            if message.role == role
            else message
            for message in messages
        ]
        try:
            leaves_out = self._render_or_refuse(others, options) == text
        except BadRequest:  # the template reads their content
            return
        if leaves_out:
            index = next(i for i, message in enumerate(messages) if message.role == role)
            raise BadRequest(
                [
                    f"messages[{index}].role={shown(role)} is not known to the model's chat "
                    "template, which ignores such ",
                    Field("messages"),
                    f"; send one of {', '.join(ROLES)}",
                ],
                f"messages[{index}].role",
                "unsupported_value",
            )

    def _render_or_refuse(
        self,
        messages: Sequence[ChatMessage],
        options: TemplateOptions,
        change: Change | None = None,
    ) -> str:
        """Renders the conversation; `change` is applied to each text of the client before the
        template sees it."""
        sent = [tool.as_sent for tool in options.tools]
        filled = [_filled(tool) for tool in sent]
        conversation = self._message_dicts(messages, options)
        try:
            return self._apply(conversation, sent, options, change)
        except Exception as failure:  # a template is a program and may raise anything
            error = failure
        if filled != sent:
            with contextlib.suppress(Exception):
                return self._apply(conversation, filled, options, change)
        reason = str(error).strip()[:_MAX_REASON_CHARS] or type(error).__name__
        whose = "this request's" if options.template else "the model's"
        raise BadRequest(
            [f"{whose} chat template rejects these ", Field("messages"), f": {reason}"],
            "chat_template" if options.template else "messages",
            "chat_template_error",
        )

    def _apply(
        self,
        conversation: list[TemplateValues],
        tools: list[TemplateValues],
        options: TemplateOptions,
        change: Change | None = None,
    ) -> str:
        documents, variables = list(options.documents), options.variables
        if change is not None:
            conversation = [
                {"role": one["role"], **changed(_texts_of_message(one), change)}
                for one in conversation
            ]
            tools, documents = changed(tools, change), changed(documents, change)
            variables = {**variables, **changed(_text_variables(variables), change)}
        template = options.template
        if self._reads_parts(template) if template else self._reads_only_parts:
            conversation = [{**one, "content": _parts(one["content"])} for one in conversation]
        return str(
            self._tokenizer.apply_chat_template(
                conversation,
                tools=tools or None,
                documents=documents or None,
                chat_template=options.template or self._override,
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **variables,
            )
        )

    def _message_dicts(
        self, messages: Sequence[ChatMessage], options: TemplateOptions
    ) -> list[TemplateValues]:
        """Converts the messages to the form that the template reads."""
        template = options.template or self.text
        return self._form(template).message_dicts(messages, knows_developer="developer" in template)

    def _find_form(self, template: str) -> HistoryForm:
        options = TemplateOptions(template=template)

        def render(form: HistoryForm, messages: Sequence[ChatMessage]) -> str:
            conversation = form.message_dicts(messages, knows_developer=True)
            return self._apply(conversation, [_PROBE_TOOL], options)

        return find_form(render)


def _reads_parts(tokenizer: Any, template: str) -> bool:
    """Whether the template reads contents only as lists of parts, as those of some models with
    images do: it writes a text as the only part of a content, but not as a content."""
    for content in (_PROBE, _parts(_PROBE)):
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], chat_template=template, tokenize=False
            )
        except Exception:  # a template is a program and may raise anything
            continue
        if _PROBE in text:
            return content is not _PROBE
    return False


def _parts(text: str) -> list[TemplateValues]:
    """Returns a content as a list of parts."""
    return [{"type": "text", "text": text}]


def _texts_of_message(message: Mapping[str, Any]) -> TemplateValues:
    """Returns all fields except the role, which is a name and holds no control token."""
    return {name: value for name, value in message.items() if name != "role"}


def _text_variables(variables: Mapping[str, Any]) -> TemplateValues:
    """Returns all variables except those that name a control token, such as `bos_token`."""
    return {name: value for name, value in variables.items() if not name.endswith("_token")}


def _filled(tool: TemplateValues) -> TemplateValues:
    """Fills in fields that a tool may omit, for templates that require them."""
    given = {name: value for name, value in tool["function"].items() if value is not None}
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {**tool, "function": {**empty, **given}}
