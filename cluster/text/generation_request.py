"""A request for answers, whatever the API: what the bodies of all endpoints are converted to, and
what `InputProcessor` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from swell.cluster.text.chat_template import TemplateOptions
from swell.cluster.text.prompt_embeds import EmbedsPrompt
from swell.cluster.text.randomness import SYSTEM_RANDOM
from swell.cluster.text.sampling_params import SamplingParams, bad_value
from swell.cluster.text.schema.chat_messages import ChatMessage, ToolChoice
from swell.cluster.text.truncation import PLAIN_TEXT, TokenizeOptions
from swell.cluster.text.validate_params import check_length
from swell.configs.lora import Adapter

Prompt = str | list[int]
"""A text, or token ids."""
MAX_PROMPTS = 1024
"""Most prompts of one request."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that the chat template writes, and the rules for its answer's reasoning and tool
    calls."""

    messages: Sequence[ChatMessage]
    template: TemplateOptions = TemplateOptions()
    tool_choice: ToolChoice | None = None
    """Among `template.tools`, which are checked; not `none` where there are tools."""
    parallel_tool_calls: bool = True
    """False: one call at most."""
    thinking_token_budget: int | None = None
    """The most tokens of reasoning; then its end is forced. -1: no limit; None: no limit, but no
    reasoning at all where the template's variable `reasoning_effort` is `none`."""


class SessionPrefix(msgspec.Struct, frozen=True):
    """What a session has before its next chunk."""

    token_ids: list[int]
    rank: int | None = None
    """The engine that probably has their KV."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to prompts, or to one conversation."""

    prompt: list[Prompt] | Conversation
    embeds: Sequence[EmbedsPrompt] = ()
    """The prompts, if they are embeddings: then `prompt` is empty."""
    prefix: SessionPrefix | None = None
    """The one prompt is a chunk of a session, and stands behind this."""
    params: SamplingParams
    """Not checked yet."""
    prompt_field: str = "prompt"
    """The field of the API that gives the prompt, as error messages name it."""
    param_names: Mapping[str, str] = {}
    """The request's names of fields of `params` that it calls otherwise; errors print these."""
    structured_outputs_field: str | None = None
    """The path of the field that gives the structured output, if it is not `structured_outputs`."""
    tokenize_options: TokenizeOptions = PLAIN_TEXT
    max_tokens_in_context: int | None = None
    """The answer has at most so many tokens, or as many as the context has room for, without an
    error where that is less. Unlike `params.max_tokens`, which must fit."""
    echo: bool = False
    """The text of each prompt is needed: its answers begin with it."""
    stream: bool = False
    priority: int = 0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    adapter: Adapter | None = None
    """What answers; None: the model alone."""
    random: Random = SYSTEM_RANDOM
    """The ids of tool calls are drawn from it."""


def split_prompts(prompt: str | Sequence[Any], field: str = "prompt") -> list[Prompt]:
    """The prompts of one request, each a text or a list of ids; `field` gives them."""
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
