"""What an answer takes, whatever the API that asked for it: typed bodies in, asks out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.generation_body import GenerationRequest
from swell.cluster.api.models import TokenizeRequest
from swell.cluster.text.bad_words import bad_words_token_ids
from swell.cluster.text.chat_template import TemplateOptions
from swell.cluster.text.child_params import check_num_children
from swell.cluster.text.detokenizer import Detokenizer, TextStart
from swell.cluster.text.generation_config import GenerationDefaults
from swell.cluster.text.model_formats import ModelFormats
from swell.cluster.text.offload import OffloadPools
from swell.cluster.text.parsers.base import ContentParser, Parser
from swell.cluster.text.prompts import PromptProcessor
from swell.cluster.text.sampling_params import BadRequest, SamplingParams, shown
from swell.cluster.text.structured_output import compile_grammar
from swell.cluster.text.truncation import TokenizeOptions, Truncation
from swell.cluster.text.validate_params import resolve_prompt_logprobs, validate
from swell.configs.schema import Config
from swell.worker.sample.wire import Grammar

TAIL_TOKENS = 16
"""At the end of a prompt, where a template may have opened the answer's reasoning."""

CompileGrammar = Callable[[], Grammar]


class RequestParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request in our own terms."""

    prompts: list[list[int]]
    prompt_texts: list[str | None]
    """Of each prompt, its text where an answer may begin with it."""
    text_start: TextStart
    params: SamplingParams
    """Checked."""
    max_tokens_per_prompt: list[int]
    """Of each prompt, the most tokens that an answer may have."""
    bad_words: list[list[int]]
    grammar: Grammar | None
    stream: bool
    priority: int = 0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    make_parser: Callable[[], Parser] = ContentParser
    """Makes what reads one answer."""


class InputProcessor:
    """One model's way from a typed body to request parameters. What takes long runs in a thread: it
    must not hold up everybody else's tokens. `size_bytes` is what the body, and what it refers to,
    had as JSON: so much work it makes."""

    def __init__(
        self,
        prompts: PromptProcessor,
        config: Config,
        defaults: GenerationDefaults,
        offloads: OffloadPools | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        """`defaults`: the model's, for requests that do not say."""
        self._prompts = prompts
        self._detokenizer = detokenizer or Detokenizer(prompts.tokenizer)
        self._defaults = defaults
        self._offloads = offloads or OffloadPools()
        self._max_children = config.serve.max_children
        self._trust_request_chat_template = config.serve.request_chat_template
        self._policy = config.scheduler.policy
        self._formats = ModelFormats(prompts.tokenizer, prompts.template.text, config.serve)

    async def completion(self, body: CompletionRequest, size_bytes: int = 0) -> RequestParams:
        self._check_priority(body.priority)
        return await self._compiled(
            *await self._offloads.bodies.run_sized(size_bytes, self._completion, body)
        )

    async def chat(self, body: ChatCompletionRequest, size_bytes: int = 0) -> RequestParams:
        self._check_priority(body.priority)
        return await self._compiled(
            *await self._offloads.bodies.run_sized(size_bytes, self._chat, body)
        )

    async def tokens(self, body: TokenizeRequest, size_bytes: int = 0) -> list[int]:
        """What a prompt or a conversation is to the model."""
        return await self._offloads.bodies.run_sized(size_bytes, self._tokens, body)

    async def _compiled(
        self, request_params: RequestParams, grammar: CompileGrammar | None
    ) -> RequestParams:
        if grammar is None:
            return request_params
        compiled = await self._offloads.grammars.run(grammar)
        return msgspec.structs.replace(request_params, grammar=compiled)

    def _completion(self, body: CompletionRequest) -> tuple[RequestParams, CompileGrammar | None]:
        params = self._params(body)
        count = len(self._prompts.split(body.prompt))
        check_num_children(count, params, self._max_children)
        prompts = self._prompts.completion_prompts(
            body.prompt, _text_options(body, add_special_tokens=True)
        )
        grammar = None
        if params.structured_outputs is not None:
            grammar = partial(
                compile_grammar, params.structured_outputs, body.structured_outputs_field
            )
        request_params = self._build_params(body, params, prompts, "prompt", TextStart.CONTINUATION)
        if body.echo:
            request_params = msgspec.structs.replace(
                request_params, prompt_texts=self._echoed(body, request_params)
            )
        return request_params, grammar

    def _echoed(self, body: CompletionRequest, request_params: RequestParams) -> list[str | None]:
        """Texts as they were sent, and else the texts of the tokens that are read."""
        skip, whole = request_params.params.skip_special_tokens, body.truncate_prompt_tokens is None
        return [
            sent
            if isinstance(sent, str) and whole
            else self._detokenizer.prompt_text(token_ids, skip)
            for sent, token_ids in zip(
                self._prompts.split(body.prompt), request_params.prompts, strict=True
            )
        ]

    def _chat(self, body: ChatCompletionRequest) -> tuple[RequestParams, CompileGrammar | None]:
        form = self._formats.of(body)
        options = TemplateOptions(
            tools=form.tools,
            add_generation_prompt=_add_generation_prompt(body),
            continue_final_message=bool(body.continue_final_message),
            template=self._template(body.chat_template),
            documents=body.documents or (),
            variables=body.template_variables(),
        )
        params = self._params(body)
        check_num_children(1, params, self._max_children)
        prompt = self._prompts.chat_prompt(
            body.messages, options, _text_options(body, add_special_tokens=False)
        )
        if form.keeps_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        continues = options.continue_final_message
        text_start = TextStart.CONTINUATION if continues else TextStart.NEW_TEXT
        request_params = self._build_params(body, params, [prompt], "messages", text_start)
        tail = self._prompts.text(prompt[-TAIL_TOKENS:])
        answer = form.of(tail)
        return msgspec.structs.replace(
            request_params, make_parser=answer.make_parser
        ), answer.grammar

    def _tokens(self, body: TokenizeRequest) -> list[int]:
        if body.messages is None:
            assert body.prompt is not None, "the body was checked"
            add = body.add_special_tokens is not False
            return self._prompts.encode(body.prompt, add_special_tokens=add)
        options = TemplateOptions(
            tools=body.tools or [],
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            template=self._template(body.chat_template),
            variables=body.chat_template_kwargs or {},
        )
        own = TokenizeOptions(add_special_tokens=bool(body.add_special_tokens))
        return self._prompts.chat_prompt(body.messages, options, own)

    def _build_params(
        self,
        body: GenerationRequest,
        params: SamplingParams,
        prompts: list[list[int]],
        field: str,
        text_start: TextStart,
    ) -> RequestParams:
        """The request_params without its grammar."""
        processor = self._prompts
        validate(params, vocab_size=processor.vocab_size)
        params = resolve_prompt_logprobs(params, sum(map(len, prompts)), processor.vocab_size)
        longest = self._defaults.max_new_tokens if params.max_tokens is None else None
        max_tokens_per_prompt = [
            processor.resolve_max_tokens(
                len(prompt),
                params.max_tokens,
                default=longest,
                min_tokens=params.min_tokens,
                field=field,
            )
            for prompt in prompts
        ]
        return RequestParams(
            prompts=prompts,
            prompt_texts=[None] * len(prompts),
            text_start=text_start if params.structured_outputs is None else TextStart.VERBATIM,
            params=params,
            max_tokens_per_prompt=max_tokens_per_prompt,
            bad_words=bad_words_token_ids(
                processor.tokenizer, params.bad_words, vocab_size=processor.vocab_size
            ),
            grammar=None,
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
        if template is not None and not self._trust_request_chat_template:
            raise BadRequest(
                "chat_template is not taken from requests here; set "
                "serve.request_chat_template=true, or serve.chat_template to a file",
                "chat_template",
                "unsupported_value",
            )
        return template


def _add_generation_prompt(body: ChatCompletionRequest) -> bool:
    asked = body.add_generation_prompt
    return not body.continue_final_message if asked is None else asked


def _text_options(body: GenerationRequest, *, add_special_tokens: bool) -> TokenizeOptions:
    """`add_special_tokens`: where the request does not say."""
    truncation = None
    if body.truncate_prompt_tokens is not None:
        answer = max(body.answer_max_tokens() or 1, 1)
        truncation = Truncation(body.truncate_prompt_tokens, body.truncation_side or "left", answer)
    given = body.add_special_tokens
    return TokenizeOptions(add_special_tokens if given is None else given, truncation)
