"""Converts a request to what engines get: template, tokens, limits, grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from swell.cluster.text.adapters import salt_of_adapter
from swell.cluster.text.grammar.structured_output import compile_grammar
from swell.cluster.text.json_grammar.schema_keywords import SchemaKeywords
from swell.cluster.text.params.field_path import rename_roots
from swell.cluster.text.params.sampling_params import (
    BadRequest,
    SamplingParams,
    bad_value,
    child_sampling_params,
    to_core_request,
)
from swell.cluster.text.params.validate_params import (
    check_num_children,
    resolve_prompt_logprobs,
    validate,
)
from swell.cluster.text.parsers.base import ContentParser, Parser
from swell.cluster.text.prompt.generation_request import (
    Conversation,
    GenerationRequest,
    Prompt,
    SessionPrefix,
)
from swell.cluster.text.prompt.model_formats import AnswerFormat, ModelFormats
from swell.cluster.text.prompt.offload import OffloadPools
from swell.cluster.text.prompt.prompt_embeds import (
    EmbedsPrompt,
    EmbedsWidth,
    check_embeds,
    check_params,
    needs_tokens,
    salt_of,
)
from swell.cluster.text.prompt.prompts import PromptProcessor
from swell.cluster.text.prompt.truncation import TokenizeOptions
from swell.cluster.text.tokens.bad_words import bad_words_token_ids
from swell.cluster.text.tokens.detokenizer import Detokenizer, TextStart
from swell.configs.lora import Adapter
from swell.engine.wire import EngineCoreRequest, PrefixHint
from swell.worker.sampler_wire import Grammar, PoolingParams

TAIL_TOKENS = 16
"""Number of last prompt tokens that are searched for reasoning opened by the template."""

MAX_ROUTED_TOKENS = 256 * 1024
"""Limit on tokens whose experts one request returns: with a large model about 400 bytes each."""

CompileGrammar = Callable[[], Grammar]
"""Compiles a grammar; raises `BadRequest`."""


class ProcessedPrompt(NamedTuple):
    token_ids: list[int]
    text: str | None
    """The prompt's text, if it was sent as text or `echo` needs it."""
    max_tokens: int
    """Maximum number of tokens of an answer."""
    segment_start: int = 0
    """See `PoolingParams`."""
    embeds: EmbedsPrompt | None = None
    """The prompt, if it is embeddings; `token_ids` are then placeholders of the same length."""


class ChildRequest(msgspec.Struct, frozen=True):
    """The request for one answer to one prompt."""

    core: EngineCoreRequest
    params: SamplingParams
    """The parameters of this answer."""
    child_index: int
    """Index among the answers to its prompt."""
    prompt_text: str | None


class RequestParams(msgspec.Struct, frozen=True, kw_only=True):
    """A `GenerationRequest` in tokens and numbers, validated."""

    prompts: list[ProcessedPrompt]
    text_start: TextStart
    params: SamplingParams
    eos_token_ids: list[int]
    bad_words: list[list[int]]
    make_parser: Callable[[], Parser]
    """Creates the parser of one answer."""
    make_content_parser: Callable[[], Parser] | None = None
    """See `AnswerFormat`."""
    stream: bool
    priority: int
    cache_salt: str | None
    data_parallel_rank: int | None
    grammar: Grammar | None = None
    pooling: PoolingParams | None = None
    """Set if the prompts are pooled, and nothing is sampled."""
    skip_prefix_cache: bool = False
    """Whether every token of a prompt is computed."""
    adapter: Adapter | None = None
    """See `GenerationRequest`; `cache_salt` then includes the adapter."""
    prefix: SessionPrefix | None = None
    """See `GenerationRequest`; the prompt includes the prefix."""
    ignored_keywords: dict[str, None] = {}
    """Paths of schema keywords that are not enforced; complete after the grammar is compiled."""

    def with_grammar(self, grammar: Grammar) -> RequestParams:
        return msgspec.structs.replace(self, grammar=grammar)

    def children(
        self,
        external_req_id: str,
        prompt: ProcessedPrompt,
        *,
        trace_headers: dict[str, str] | None = None,
    ) -> list[ChildRequest]:
        """Returns the request of each answer to `prompt`, which is one of `prompts`."""
        return [
            ChildRequest(
                self._of_session(
                    to_core_request(
                        params,
                        external_req_id=external_req_id,
                        prompt_token_ids=prompt.token_ids,
                        max_tokens=prompt.max_tokens,
                        eos_token_ids=self.eos_token_ids,
                        bad_words=self.bad_words,
                        grammar=self.grammar,
                        priority=self.priority,
                        cache_salt=self._salt(prompt),
                        data_parallel_rank=self.data_parallel_rank,
                        trace_headers=trace_headers,
                        pooling=self._pooling(prompt),
                        skip_prefix_cache=self.skip_prefix_cache,
                        prompt_embeds=None if prompt.embeds is None else prompt.embeds.embeds,
                        adapter=self.adapter,
                    )
                ),
                params,
                index,
                prompt.text,
            )
            for index, params in enumerate(child_sampling_params(self.params))
        ]

    def _salt(self, prompt: ProcessedPrompt) -> str | None:
        if prompt.embeds is None:
            return self.cache_salt
        return salt_of(prompt.embeds.digest, self.cache_salt)

    def _of_session(self, core: EngineCoreRequest) -> EngineCoreRequest:
        """Keeps the KV of a session's request, and names the engine that answered it last."""
        if (prefix := self.prefix) is None:
            return core
        hint = None if prefix.rank is None else PrefixHint(prefix.rank, len(prefix.token_ids))
        return msgspec.structs.replace(core, keep_blocks=True, prefix_hint=hint)

    def _pooling(self, prompt: ProcessedPrompt) -> PoolingParams | None:
        if self.pooling is None or not prompt.segment_start:
            return self.pooling
        return msgspec.structs.replace(self.pooling, segment_start=prompt.segment_start)


class InputProcessor(msgspec.Struct, frozen=True):
    """Converts a `GenerationRequest` to `RequestParams` for one model, for HTTP and for `LLM`. Safe
    to call from several threads."""

    prompts: PromptProcessor
    detokenizer: Detokenizer
    eos_token_ids: list[int]
    formats: ModelFormats | None = None
    """Formats of reasoning and tool calls; without them all of an answer is content."""
    default_max_tokens: int | None = None
    """Maximum number of tokens of an answer if the request sets no limit."""
    max_children: int | None = None
    policy: str = "priority"
    """The scheduler's policy."""
    allow_chat_template: bool = False
    """Whether a request may contain its own chat template."""
    embeds_width: EmbedsWidth | None = None
    """Width of prompts that are embeddings; None if they are refused."""
    routed_experts: bool = False
    """Whether engines record which experts computed a token."""
    schema_keywords: str = "refuse"
    """`serve.schema_keywords`, for use without `formats`."""

    def process(self, request: GenerationRequest) -> RequestParams:
        """Converts a request, and compiles its grammar, which may be slow. Raises `BadRequest`."""
        processed, compiles = self.prepare(request)
        return processed if compiles is None else processed.with_grammar(compiles())

    def prepare(self, request: GenerationRequest) -> tuple[RequestParams, CompileGrammar | None]:
        """Converts a request; also returns a function that compiles its grammar, or None. Raises
        `BadRequest`, with the names that the request uses for its fields."""
        try:
            return self._prepare(request)
        except BadRequest as error:
            raise error.renamed(rename_roots(request.param_names)) from None

    def _prepare(self, request: GenerationRequest) -> tuple[RequestParams, CompileGrammar | None]:
        check_priority(request.priority, self.policy)
        prompts = self._tokenize(request)
        answer = self._answer_format(request, prompts)
        params, vocab_size = request.params, self.prompts.vocab_size
        if answer.keeps_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        validate(params, vocab_size=vocab_size)
        if request.embeds:
            check_params(params, request.embeds, request.prompt_field, echo=request.echo)
        params = resolve_prompt_logprobs(params, sum(map(len, prompts)), vocab_size)
        processed_prompts = self._processed_prompts(request, params, prompts)
        if params.return_routed_experts:
            self._check_routed_experts(processed_prompts, params.num_children)
        processed = RequestParams(
            prompts=processed_prompts,
            text_start=_text_start(request),
            params=params,
            eos_token_ids=self.eos_token_ids,
            bad_words=bad_words_token_ids(
                self.prompts.tokenizer, params.bad_words, vocab_size=vocab_size
            ),
            make_parser=answer.make_parser,
            make_content_parser=answer.make_content_parser,
            stream=request.stream,
            priority=request.priority,
            cache_salt=_salt(request),
            data_parallel_rank=request.data_parallel_rank,
            adapter=request.adapter,
            prefix=request.prefix,
            ignored_keywords=answer.keywords.ignored,
        )
        return processed, answer.grammar

    def _check_routed_experts(self, prompts: list[ProcessedPrompt], num_children: int) -> None:
        field = "return_routed_experts"
        if not self.routed_experts:
            problem = "needs a server with model.routed_experts: true; leave it out"
            raise bad_value(field, True, problem)
        tokens = sum(len(prompt.token_ids) + prompt.max_tokens for prompt in prompts)
        if tokens * num_children > MAX_ROUTED_TOKENS:
            problem = (
                f"of up to {tokens * num_children} tokens of prompts and answers; at most "
                f"{MAX_ROUTED_TOKENS} are returned. Send max_tokens, or fewer prompts or answers"
            )
            raise bad_value(field, True, problem)

    def _answer_format(self, request: GenerationRequest, prompts: list[list[int]]) -> AnswerFormat:
        if isinstance(request.prompt, Conversation) and self.formats is not None:
            end = self.prompts.text(prompts[0][-TAIL_TOKENS:])
            return self.formats.of(request, request.prompt, end)
        form, grammar = request.params.structured_outputs, None
        keywords = SchemaKeywords(ignore=self.schema_keywords == "ignore")
        if form is not None:
            grammar = partial(compile_grammar, form, request.structured_outputs_field, keywords)
        keeps, parser = False, ContentParser
        return AnswerFormat(
            keeps_special_tokens=keeps, make_parser=parser, grammar=grammar, keywords=keywords
        )

    def _tokenize(self, request: GenerationRequest) -> list[list[int]]:
        if self.max_children is not None:
            count = 1
            if not isinstance(request.prompt, Conversation):
                count = len(request.embeds or request.prompt)
            check_num_children(count, request.params, self.max_children)
        if isinstance(request.prompt, Conversation) and self.formats is not None:
            self.formats.check_tools(request.prompt.template.tools)
        if request.embeds:
            return self._placeholders(request)
        prompts = self.tokenize(request.prompt, request.tokenize_options, request.prompt_field)
        if request.prefix is not None:
            (chunk,) = prompts
            prompts = [[*request.prefix.token_ids, *chunk]]
            self.prompts.check_ids(prompts[0], request.prompt_field)
        return prompts

    def _placeholders(self, request: GenerationRequest) -> list[list[int]]:
        """Returns placeholder ids for the embeddings of each prompt."""
        check_embeds(request.embeds, self.embeds_width, request.prompt_field)
        if (cut := request.tokenize_options.truncation) is not None:
            raise needs_tokens("truncate_prompt_tokens", cut.tokens, request.prompt_field)
        ids = [[0] * prompt.embeds.num_tokens for prompt in request.embeds]
        for placeholders in ids:
            self.prompts.check_ids(placeholders, request.prompt_field)
        return ids

    def tokenize(
        self, prompt: list[Prompt] | Conversation, options: TokenizeOptions, field: str = "prompt"
    ) -> list[list[int]]:
        """Returns the token ids of each prompt; a conversation is one prompt. Errors name it
        `field`."""
        if not isinstance(prompt, Conversation):
            return self.prompts.completion_prompts(prompt, options, field)
        if prompt.template.template is not None and not self.allow_chat_template:
            raise BadRequest(  # a template is a program
                "chat_template is not taken from requests here; set "
                "serve.request_chat_template=true, or serve.chat_template to a file",
                "chat_template",
                "unsupported_value",
            )
        return [self.prompts.chat_prompt(prompt.messages, prompt.template, options)]

    def _processed_prompts(
        self, request: GenerationRequest, params: SamplingParams, prompts: list[list[int]]
    ) -> list[ProcessedPrompt]:
        """Processes the prompts. With `echo`, a prompt that was not sent as text gets one too."""
        sent_prompts: Sequence[Prompt | EmbedsPrompt | None] = [None]
        if not isinstance(request.prompt, Conversation):
            sent_prompts = request.embeds or request.prompt
        is_whole, found = request.tokenize_options.truncation is None, []
        for sent, token_ids in zip(sent_prompts, prompts, strict=True):
            max_tokens = self.prompts.resolve_max_tokens(
                len(token_ids),
                params.max_tokens,
                default=self.default_max_tokens,
                min_tokens=params.min_tokens,
                field=request.prompt_field,
            )
            if request.max_tokens_in_context is not None:
                max_tokens = min(max_tokens, request.max_tokens_in_context)
            text = None
            if isinstance(sent, str) and is_whole:
                text = sent
            elif request.echo:
                text = self.detokenizer.prompt_text(token_ids, params.skip_special_tokens)
            embeds = sent if isinstance(sent, EmbedsPrompt) else None
            found.append(ProcessedPrompt(token_ids, text, max_tokens, embeds=embeds))
        return found


def check_priority(priority: int, policy: str) -> None:
    """Raises `BadRequest` for a priority that the scheduler's policy does not read."""
    if priority and policy != "priority":
        rule = (
            f"has no effect here: scheduler.policy={policy!r} takes requests as they "
            "come; leave it out, or set scheduler.policy=priority"
        )
        raise bad_value("priority", priority, rule, "unsupported_value")


def _text_start(request: GenerationRequest) -> TextStart:
    if request.params.structured_outputs is not None or request.embeds:
        return TextStart.VERBATIM
    if isinstance(request.prompt, Conversation):
        continues = request.prompt.template.continue_final_message
        return TextStart.CONTINUATION if continues else TextStart.NEW_TEXT
    return TextStart.CONTINUATION


class AsyncInputProcessor:
    """`InputProcessor` for an event loop.

    Slow work runs in a thread, so that it does not delay the tokens of other requests. `size_bytes`
    is the size of the body as JSON plus the size of the data that it refers to: the work grows with
    it.
    """

    def __init__(self, processor: InputProcessor, offloads: OffloadPools) -> None:
        self._processor = processor
        self._offloads = offloads

    async def process(
        self, convert: Callable[[], GenerationRequest], size_bytes: int = 0
    ) -> RequestParams:
        """Returns the parameters of the request that `convert` creates, which may be slow too.
        Raises `BadRequest`."""
        processed, compiles = await self._offloads.bodies.run_sized(
            size_bytes, lambda: self._processor.prepare(convert())
        )
        if compiles is None:
            return processed
        return processed.with_grammar(await self._offloads.grammars.run(compiles))

    async def tokenize(
        self,
        convert: Callable[[], tuple[list[Prompt] | Conversation, TokenizeOptions]],
        size_bytes: int = 0,
    ) -> list[int]:
        """Returns the token ids of one prompt, or of a conversation."""
        (token_ids,) = await self._offloads.bodies.run_sized(
            size_bytes, lambda: self._processor.tokenize(*convert())
        )
        return token_ids


def _salt(request: GenerationRequest) -> str | None:
    """Returns the request's cache salt, including its adapter."""
    if request.adapter is None:
        return request.cache_salt
    return salt_of_adapter(request.adapter, request.cache_salt)
