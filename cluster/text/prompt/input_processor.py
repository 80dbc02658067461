"""Converts a request to the requests that engines get: template, tokens, limits, grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from swell.cluster.text.adapters import salt_of_adapter
from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.grammar.structured_output import compile_grammar
from swell.cluster.text.json_grammar.schema_keywords import SchemaKeywords
from swell.cluster.text.params.field_path import rename_roots
from swell.cluster.text.params.sampling_params import (
    SamplingParams,
    internal_request_id,
    sampler_params,
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
)
from swell.cluster.text.prompt.model_formats import AnswerFormat, ModelFormats
from swell.cluster.text.prompt.prompt_embeds import (
    EmbedsPrompt,
    EmbedsWidth,
    check_embeds,
    check_params,
    needs_tokens,
    salt_of,
)
from swell.cluster.text.prompt.prompt_processor import PromptProcessor
from swell.cluster.text.prompt.thread_offload import OffloadPools
from swell.cluster.text.prompt.truncation import TEMPLATE_TEXT, TokenizeOptions
from swell.cluster.text.tokens.bad_words import bad_words_token_ids
from swell.cluster.text.tokens.detokenizer import Detokenizer, TextStart
from swell.configs.section import LogprobsMode
from swell.engine.wire import EngineCoreRequest, PrefixHint, RepetitionPattern
from swell.worker.sampler_wire import Grammar

TAIL_TOKENS = 16
"""Number of last prompt tokens that are searched for reasoning opened by the template."""

MAX_ROUTED_TOKENS = 256 * 1024
"""Limit on tokens whose experts one request returns: with a large model about 400 bytes each."""

CompileGrammar = Callable[[], Grammar]
"""Compiles a grammar; raises `BadRequest`."""


class ProcessedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The requests to engines that together answer a `GenerationRequest` or a `PoolingRequest`, and
    how their outputs are read."""

    requests: list[EngineCoreRequest]
    """The requests of the first prompt, one for each answer (`params.num_children`), then those of
    the next prompt."""
    prompt_texts: list[str | None]
    """The text of each prompt, if it was sent as text or `echo` needs it."""
    params: SamplingParams
    text_start: TextStart
    make_parser: Callable[[], Parser]
    """Creates the parser of one answer."""
    make_content_parser: Callable[[], Parser] | None = None
    """See `AnswerFormat`."""
    stream: bool
    ignored_keywords: dict[str, None] = {}
    """Paths of schema keywords that are not enforced; complete after the grammar is compiled."""

    def with_grammar(self, grammar: Grammar) -> ProcessedRequest:
        replace = msgspec.structs.replace
        requests = [
            replace(request, sampler=replace(request.sampler, grammar=grammar))
            for request in self.requests
        ]
        return replace(self, requests=requests)


class InputProcessor(msgspec.Struct, frozen=True):
    """Converts a `GenerationRequest` to a `ProcessedRequest` for one model, for HTTP and for `LLM`.
    Safe to call from several threads."""

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
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """`model.logprobs_mode`."""
    schema_keywords: str = "refuse"
    """`serve.schema_keywords`, for use without `formats`."""

    def process(self, request: GenerationRequest) -> ProcessedRequest:
        """Converts a request, and compiles its grammar, which may be slow. Raises `BadRequest`."""
        processed, compiles = self.prepare(request)
        return processed if compiles is None else processed.with_grammar(compiles())

    def prepare(self, request: GenerationRequest) -> tuple[ProcessedRequest, CompileGrammar | None]:
        """Converts a request; also returns a function that compiles its grammar, or None. Raises
        `BadRequest`, with the names that the request uses for its fields."""
        try:
            return self._prepare(request)
        except BadRequest as error:
            raise error.renamed(rename_roots(request.param_names)) from None

    def _prepare(
        self, request: GenerationRequest
    ) -> tuple[ProcessedRequest, CompileGrammar | None]:
        check_priority(request.priority, self.policy)
        prompts = self._tokenize(request)
        answer = self._answer_format(request, prompts)
        params, vocab_size = request.params, self.prompts.vocab_size
        if answer.keeps_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        validate(params, vocab_size=vocab_size)
        if params.num_children > params.n and self.logprobs_mode.endswith("_logits"):
            raise bad_value(
                "best_of",
                params.best_of,
                "ranks answers by log probabilities, but model.logprobs_mode="
                f"{self.logprobs_mode} replaces them by logits; set best_of to n or omit it",
            )
        if request.embeds:
            check_params(params, request.embeds, request.prompt_field, echo=request.echo)
        params = resolve_prompt_logprobs(params, sum(map(len, prompts)), vocab_size)
        max_tokens = self._max_tokens(request, params, prompts)
        if params.return_routed_experts:
            self._check_routed_experts(params, sum(map(len, prompts)) + sum(max_tokens))
        processed = ProcessedRequest(
            requests=self._engine_requests(request, params, prompts, max_tokens),
            prompt_texts=self._prompt_texts(request, params, prompts),
            text_start=_text_start(request),
            params=params,
            make_parser=answer.make_parser,
            make_content_parser=answer.make_content_parser,
            stream=request.stream,
            ignored_keywords=answer.keywords.ignored,
        )
        return processed, answer.grammar

    def _engine_requests(
        self,
        request: GenerationRequest,
        params: SamplingParams,
        prompts: list[list[int]],
        max_tokens: list[int],
    ) -> list[EngineCoreRequest]:
        """Returns the requests to engines, without their grammar. The requests of a session keep
        their KV, and name the engine that answered the session last."""
        prefix, hint = request.prefix, None
        if prefix is not None and prefix.rank is not None:
            hint = PrefixHint(prefix.rank, len(prefix.token_ids))
        bad_words = bad_words_token_ids(
            self.prompts.tokenizer, params.bad_words, vocab_size=self.prompts.vocab_size
        )
        salt = _salt(request)
        embeds: Sequence[EmbedsPrompt | None] = request.embeds or [None] * len(prompts)
        return [
            EngineCoreRequest(
                request_id=internal_request_id(request.external_req_id),
                prompt_token_ids=token_ids,
                sampler=sampler_params(params, index, bad_words),
                max_tokens=limit,
                min_tokens=params.min_tokens,
                eos_token_ids=[] if params.ignore_eos else self.eos_token_ids,
                stop_token_ids=params.stop_token_ids,
                priority=request.priority,
                cache_salt=salt if sent is None else salt_of(sent.digest, salt),
                data_parallel_rank=request.data_parallel_rank,
                trace_headers=request.trace_headers,
                external_req_id=request.external_req_id,
                skip_prefix_cache=params.prompt_logprobs is not None,
                prompt_embeds=None if sent is None else sent.embeds,
                adapter=request.adapter,
                keep_blocks=prefix is not None,
                prefix_hint=hint,
                repetition=_repetition(params),
            )
            for token_ids, limit, sent in zip(prompts, max_tokens, embeds, strict=True)
            for index in range(params.num_children)
        ]

    def _check_routed_experts(self, params: SamplingParams, num_tokens: int) -> None:
        """Raises `BadRequest` if the experts of `num_tokens` tokens of prompts, each with one
        answer, are not returned."""
        field = "return_routed_experts"
        if not self.routed_experts:
            problem = "needs a server with model.routed_experts: true; leave it out"
            raise bad_value(field, True, problem)
        if (whole := num_tokens * params.num_children) > MAX_ROUTED_TOKENS:
            problem = (
                f"would return up to {whole} tokens of prompts and answers; at most "
                f"{MAX_ROUTED_TOKENS} are allowed. Send a lower max_tokens, or request fewer "
                "prompts or answers"
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
                "chat_template is not accepted in requests here; set "
                "serve.request_chat_template=true, or serve.chat_template to a file",
                "chat_template",
                "unsupported_value",
            )
        return [self.prompts.chat_prompt(prompt.messages, prompt.template, options)]

    def _max_tokens(
        self, request: GenerationRequest, params: SamplingParams, prompts: list[list[int]]
    ) -> list[int]:
        """Returns the maximum number of tokens of an answer to each prompt."""
        limits = [
            self.prompts.resolve_max_tokens(
                len(token_ids),
                params.max_tokens,
                default=self.default_max_tokens,
                min_tokens=params.min_tokens,
                field=request.prompt_field,
            )
            for token_ids in prompts
        ]
        if (most := request.max_tokens_in_context) is not None:
            return [min(limit, most) for limit in limits]
        return limits

    def _prompt_texts(
        self, request: GenerationRequest, params: SamplingParams, prompts: list[list[int]]
    ) -> list[str | None]:
        """Returns the texts of the prompts. With `echo`, a prompt that was not sent as text gets
        one too."""
        sent_prompts: Sequence[Prompt | None] = [None] * len(prompts)
        if not isinstance(request.prompt, Conversation) and not request.embeds:
            sent_prompts = request.prompt
        is_whole, texts = request.tokenize_options.truncation is None, list[str | None]()
        for sent, token_ids in zip(sent_prompts, prompts, strict=True):
            text = sent if isinstance(sent, str) and is_whole else None
            if text is None and request.echo:
                text = self.detokenizer.prompt_text(token_ids, params.skip_special_tokens)
            texts.append(text)
        return texts


def check_priority(priority: int, policy: str) -> None:
    """Raises `BadRequest` for a priority that the scheduler's policy does not read."""
    if priority and policy != "priority":
        rule = (
            f"has no effect here: scheduler.policy={policy!r} schedules requests in the order of "
            "their arrival; leave it out, or set scheduler.policy=priority"
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
    ) -> ProcessedRequest:
        """Returns the requests of the request that `convert` creates, which may be slow too.
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

    def reasoning_tokens(self, texts: Sequence[str], most: int) -> int:
        """Returns the number of reasoning tokens in answers with `most` tokens. Tokenizes the texts
        again, which may take long, and may yield more tokens than the model wrote: the result is at
        most `most`."""
        count = 0
        for text in texts:
            try:
                if text:
                    count += len(self._processor.tokenize([text], TEMPLATE_TEXT)[0])
            except BadRequest:  # too long for a prompt
                return most
        return min(count, most)

    async def reasoning_tokens_offloaded(self, texts: Sequence[str], most: int) -> int:
        """Counts in the same way without delaying other requests."""
        size = sum(map(len, texts))
        return await self._offloads.bodies.run_sized(size, self.reasoning_tokens, texts, most)


def _repetition(params: SamplingParams) -> RepetitionPattern | None:
    """Returns the engine's form of `repetition_detection`."""
    detection = params.repetition_detection
    if detection is None or not detection.max_pattern_size:
        return None
    least = max(1, detection.min_pattern_size)
    return RepetitionPattern(least, detection.max_pattern_size, detection.min_count)


def _salt(request: GenerationRequest) -> str | None:
    """Returns the request's cache salt, including its adapter."""
    if request.adapter is None:
        return request.cache_salt
    return salt_of_adapter(request.adapter, request.cache_salt)
