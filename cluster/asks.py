"""What an answer takes, whatever the API that asked for it: typed bodies in, asks out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from swell.cluster.formats import ModelFormats
from swell.cluster.generation_config import GenerationDefaults
from swell.cluster.openai.chat import ChatCompletionRequest
from swell.cluster.openai.completions import CompletionRequest
from swell.cluster.openai.generation import GenerationRequest
from swell.cluster.openai.models import TokenizeRequest
from swell.cluster.params import BadRequest, SamplingParams, shown
from swell.cluster.parsers.base import ContentParser, Parser
from swell.cluster.prompt import PromptProcessor
from swell.cluster.structured import compile_grammar
from swell.cluster.templates import TemplateOptions
from swell.cluster.validate import validate
from swell.cluster.words import bad_word_tokens
from swell.configs.schema import Config
from swell.worker.sample.wire import Grammar

TAIL_TOKENS = 16
"""At the end of a prompt, where a template may have opened the answer's reasoning."""

Ids = TypeVar("Ids", list[int], list[list[int]])


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request in our own terms."""

    prompts: list[list[int]]
    params: SamplingParams
    """Checked."""
    budgets: list[int]
    """Of each prompt, the most tokens that an answer may have."""
    bad_words: list[list[int]]
    grammar: Grammar | None
    stream: bool
    priority: int = 0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    make_parser: Callable[[], Parser] = ContentParser
    """Makes what reads one answer."""


class AskMaker:
    """One model's way from a typed body to an ask. What takes long runs in a thread: it must not
    hold up everybody else's tokens."""

    def __init__(
        self,
        prompts: PromptProcessor,
        config: Config,
        defaults: GenerationDefaults,
    ) -> None:
        """`defaults`: the model's, for requests that do not say."""
        self._prompts = prompts
        self._defaults = defaults
        self._trusts_templates = config.serve.request_chat_template
        self._policy = config.scheduler.policy
        self._formats = ModelFormats(prompts.tokenizer, prompts.template.text, config.serve)

    async def completion(self, body: CompletionRequest) -> Ask:
        self._check_priority(body.priority)
        prompts = await self._tokenize(body.prompt, self._prompts.completion_prompts, body.prompt)
        return await self._ask(body, self._params(body), prompts, "prompt")

    async def chat(self, body: ChatCompletionRequest) -> Ask:
        self._check_priority(body.priority)
        form = self._formats.of(body)
        options = TemplateOptions(
            tools=form.tools,
            add_generation_prompt=_default_true(body),
            continue_final_message=bool(body.continue_final_message),
            template=self._template(body.chat_template),
            variables=_variables(body),
        )
        prompt = await self._tokenize(
            body.messages, self._prompts.chat_prompt, body.messages, options
        )
        params = self._params(body)
        if form.keeps_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        ask = await self._ask(body, params, [prompt], "messages", form.grammar)
        tail = self._prompts.text(prompt[-TAIL_TOKENS:])
        return msgspec.structs.replace(ask, make_parser=partial(form.make_parser, tail))

    async def tokens(self, body: TokenizeRequest) -> list[int]:
        """What a prompt or a conversation is to the model."""
        if body.messages is None:
            return await self._tokenize(
                body.prompt, self._encode, body.prompt, body.add_special_tokens
            )
        options = TemplateOptions(
            tools=body.tools or [],
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs or {},
        )
        return await self._tokenize(
            body.messages, self._prompts.chat_prompt, body.messages, options
        )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._prompts.encode(text, add_special_tokens=add_special_tokens)

    async def _tokenize(self, text: object, tokenize: Callable[..., Ids], *args: object) -> Ids:
        if self._prompts.is_long(text):
            return await asyncio.to_thread(tokenize, *args)
        return tokenize(*args)

    async def _ask(
        self,
        body: GenerationRequest,
        params: SamplingParams,
        prompts: list[list[int]],
        field: str,
        grammar: Callable[[], Grammar] | None = None,
    ) -> Ask:
        """`grammar` is that of tool calls; the wish's own is made here."""
        processor = self._prompts
        validate(params, vocab_size=processor.vocab_size)
        longest = self._defaults.max_new_tokens if params.max_tokens is None else None
        budgets = [
            processor.resolve_max_tokens(
                len(prompt),
                params.max_tokens,
                default=longest,
                min_tokens=params.min_tokens,
                field=field,
            )
            for prompt in prompts
        ]
        if params.structured_outputs is not None:
            grammar = partial(compile_grammar, params.structured_outputs, body.form_field)
        return Ask(
            prompts=prompts,
            params=params,
            budgets=budgets,
            bad_words=bad_word_tokens(
                processor.tokenizer, params.bad_words, vocab_size=processor.vocab_size
            ),
            grammar=None if grammar is None else await asyncio.to_thread(grammar),
            stream=bool(body.stream),
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            data_parallel_rank=body.data_parallel_rank,
        )

    def _params(self, body: GenerationRequest) -> SamplingParams:
        return body.sampling_params(self._defaults.sampling)

    def _check_priority(self, priority: int | None) -> None:
        if priority and self._policy != "priority":
            raise BadRequest(
                f"priority={shown(priority)} has no effect here: scheduler.policy="
                f"{self._policy!r} takes requests as they come; leave it out, or set "
                "scheduler.policy=priority",
                "priority",
                "unsupported_value",
            )

    def _template(self, template: str | None) -> str | None:
        """A template is a program: only whom the operator trusts may send one."""
        if template is not None and not self._trusts_templates:
            raise BadRequest(
                "chat_template is not taken from requests here; set "
                "serve.request_chat_template=true, or serve.chat_template to a file",
                "chat_template",
                "unsupported_value",
            )
        return template


def _default_true(body: ChatCompletionRequest) -> bool:
    asked = body.add_generation_prompt
    return not body.continue_final_message if asked is None else asked


def _variables(body: ChatCompletionRequest) -> dict[str, Any]:
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return {**effort, **(body.chat_template_kwargs or {})}
