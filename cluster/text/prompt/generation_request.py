"""The request for answers that the bodies of all endpoints are converted to, and that
`InputProcessor` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from swell.cluster.text.errors import bad_value
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.params.validate_params import check_length
from swell.cluster.text.prompt.chat_template import TemplateOptions
from swell.cluster.text.prompt.prompt_embeds import EmbedsPrompt
from swell.cluster.text.prompt.truncation import PLAIN_TEXT, TokenizeOptions
from swell.cluster.text.random_ids import SYSTEM_RANDOM
from swell.cluster.text.schema.chat_messages import ChatMessage, ToolChoice
from swell.configs.lora import Adapter

Prompt = str | list[int]
"""A text, or token ids."""
MAX_PROMPTS = 1024
"""Maximum number of prompts of one request."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that the chat template renders, and the rules for reasoning and tool calls in its
    answer."""

    messages: Sequence[ChatMessage]
    template: TemplateOptions = TemplateOptions()
    tool_choice: ToolChoice | None = None
    """A choice among `template.tools`, which are checked; not `none` if there are tools."""
    parallel_tool_calls: bool = True
    """False allows at most one call."""
    thinking_token_budget: int | None = None
    """Maximum number of reasoning tokens; then the end of the reasoning is forced. -1 means no
    limit. None means no limit, but no reasoning at all if the template variable `reasoning_effort`
    is `none`."""


class SessionPrefix(msgspec.Struct, frozen=True):
    """The tokens of a session before its next chunk."""

    token_ids: list[int]
    rank: int | None = None
    """Rank of the engine that probably has their KV."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for answers to prompts, or to one conversation."""

    prompt: list[Prompt] | Conversation
    embeds: Sequence[EmbedsPrompt] = ()
    """The prompts, if they are embeddings; `prompt` is empty then."""
    prefix: SessionPrefix | None = None
    """The tokens before the prompt, if the only prompt is a chunk of a session."""
    params: SamplingParams
    """Sampling parameters, not validated yet."""
    prompt_field: str = "prompt"
    """The API field that holds the prompt, for error messages."""
    param_names: Mapping[str, str] = {}
    """Names that the request uses for fields of `params`, if they differ; errors print these."""
    structured_outputs_field: str | None = None
    """The path of the field that holds the structured output, if it is not `structured_outputs`."""
    tokenize_options: TokenizeOptions = PLAIN_TEXT
    max_tokens_in_context: int | None = None
    """Maximum number of tokens of the answer, reduced if the context has less room.
    `params.max_tokens`, in contrast, must fit."""
    echo: bool = False
    """Whether each answer begins with the text of its prompt, which is then needed."""
    stream: bool = False
    priority: int = 0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    adapter: Adapter | None = None
    """The adapter that answers; None for the model without an adapter."""
    external_req_id: str = ""
    """The id that the client knows."""
    trace_headers: dict[str, str] | None = None
    """W3C trace headers of the HTTP request."""
    random: Random = SYSTEM_RANDOM
    """Source of the random ids of tool calls."""


def split_prompts(prompt: str | Sequence[Any], field: str = "prompt") -> list[Prompt]:
    """Splits the prompt field into the prompts of a request, each a text or a list of ids; `field`
    names it in errors."""
    if isinstance(prompt, str):
        return [prompt]
    parts = list(prompt)
    if not parts:
        raise bad_value(field, parts, "is empty; a prompt needs at least one token")
    kinds = {type(part) for part in parts}
    if kinds == {int}:
        return [parts]
    if kinds not in ({str}, {list}):
        rule = (
            "mixes its forms: send a text, a list of texts, a list of token ids, or a list of "
            "lists of token ids"
        )
        raise bad_value(field, parts, rule)
    check_length(field, parts, "prompts", MAX_PROMPTS)
    return parts
