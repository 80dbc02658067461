"""What an answer takes, whatever the API that asked for it: typed bodies in, asks out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.generation_body import GenerationRequest
from swell.cluster.api.models import TokenizeRequest
from swell.cluster.client.parallel_sampling import check_children
from swell.cluster.text.bad_words import bad_word_tokens
from swell.cluster.text.chat_template import TemplateOptions
from swell.cluster.text.detokenizer import Detokenizer, Opening
from swell.cluster.text.generation_config import GenerationDefaults
from swell.cluster.text.model_formats import ModelFormats
from swell.cluster.text.offload import Offloads
from swell.cluster.text.parsers.base import ContentParser, Parser
from swell.cluster.text.prompts import PromptProcessor
from swell.cluster.text.sampling_params import BadRequest, SamplingParams, shown
from swell.cluster.text.structured_output import compile_grammar
from swell.cluster.text.truncation import Keep, TextOptions
from swell.cluster.text.validate_params import validate, with_vocabulary
from swell.configs.schema import Config
from swell.worker.sample.wire import Grammar

TAIL_TOKENS = 16
"""At the end of a prompt, where a template may have opened the answer's reasoning."""

CompileGrammar = Callable[[], Grammar]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request in our own terms."""

    prompts: list[list[int]]
    prompt_texts: list[str | None]
    """Of each prompt, its text where an answer may begin with it."""
    opening: Opening
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
    hold up everybody else's tokens. `size_bytes` is what the body, and what it refers to, had as
    JSON: so much work it makes."""

    def __init__(
        self,
        prompts: PromptProcessor,
        config: Config,
        defaults: GenerationDefaults,
        offloads: Offloads | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        """`defaults`: the model's, for requests that do not say."""
        self._prompts = prompts
        self._detokenizer = detokenizer or Detokenizer(prompts.tokenizer)
        self._defaults = defaults
        self._offloads = offloads or Offloads()
        self._max_children = config.serve.max_children
        self._trusts_templates = config.serve.request_chat_template
        self._policy = config.scheduler.policy
        self._formats = ModelFormats(prompts.tokenizer, prompts.template.text, config.serve)

    async def completion(self, body: CompletionRequest, size_bytes: int = 0) -> Ask:
        self._check_priority(body.priority)
        return await self._compiled(
            *await self._offloads.bodies.run_sized(size_bytes, self._completion, body)
        )

    async def chat(self, body: ChatCompletionRequest, size_bytes: int = 0) -> Ask:
        self._check_priority(body.priority)
        return await self._compiled(
            *await self._offloads.bodies.run_sized(size_bytes, self._chat, body)
        )

    async def tokens(self, body: TokenizeRequest, size_bytes: int = 0) -> list[int]:
        """What a prompt or a conversation is to the model."""
        return await self._offloads.bodies.run_sized(size_bytes, self._tokens, body)

    async def _compiled(self, ask: Ask, grammar: CompileGrammar | None) -> Ask:
        if grammar is None:
            return ask
        compiled = await self._offloads.grammars.run(grammar)
        return msgspec.structs.replace(ask, grammar=compiled)

    def _completion(self, body: CompletionRequest) -> tuple[Ask, CompileGrammar | None]:
        params = self._params(body)
        count = len(self._prompts.split(body.prompt))
        check_children(count, params, self._max_children)
        prompts = self._prompts.completion_prompts(
            body.prompt, _text_options(body, add_special_tokens=True)
        )
        grammar = None
        if params.structured_outputs is not None:
            grammar = partial(compile_grammar, params.structured_outputs, body.form_field)
        ask = self._ask(body, params, prompts, "prompt", Opening.CONTINUATION)
        if body.echo:
            ask = msgspec.structs.replace(ask, prompt_texts=self._echoed(body, ask))
        return ask, grammar

    def _echoed(self, body: CompletionRequest, ask: Ask) -> list[str | None]:
        """Texts as they were sent, and else the texts of the tokens that are read."""
        skip, whole = ask.params.skip_special_tokens, body.truncate_prompt_tokens is None
        return [
            sent
            if isinstance(sent, str) and whole
            else self._detokenizer.prompt_text(token_ids, skip)
            for sent, token_ids in zip(self._prompts.split(body.prompt), ask.prompts, strict=True)
        ]

    def _chat(self, body: ChatCompletionRequest) -> tuple[Ask, CompileGrammar | None]:
        form = self._formats.of(body)
        options = TemplateOptions(
            tools=form.tools,
            add_generation_prompt=_default_true(body),
            continue_final_message=bool(body.continue_final_message),
            template=self._template(body.chat_template),
            documents=body.documents or (),
            variables=body.template_variables(),
        )
        params = self._params(body)
        check_children(1, params, self._max_children)
        prompt = self._prompts.chat_prompt(
            body.messages, options, _text_options(body, add_special_tokens=False)
        )
        if form.keeps_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        continues = options.continue_final_message
        opening = Opening.CONTINUATION if continues else Opening.BEGINNING
        ask = self._ask(body, params, [prompt], "messages", opening)
        tail = self._prompts.text(prompt[-TAIL_TOKENS:])
        answer = form.of(tail)
        return msgspec.structs.replace(ask, make_parser=answer.make_parser), answer.grammar

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
        own = TextOptions(add_special_tokens=bool(body.add_special_tokens))
        return self._prompts.chat_prompt(body.messages, options, own)

    def _ask(
        self,
        body: GenerationRequest,
        params: SamplingParams,
        prompts: list[list[int]],
        field: str,
        opening: Opening,
    ) -> Ask:
        """The ask without its grammar."""
        processor = self._prompts
        validate(params, vocab_size=processor.vocab_size)
        params = with_vocabulary(params, sum(map(len, prompts)), processor.vocab_size)
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
        return Ask(
            prompts=prompts,
            prompt_texts=[None] * len(prompts),
            opening=opening if params.structured_outputs is None else Opening.VERBATIM,
            params=params,
            budgets=budgets,
            bad_words=bad_word_tokens(
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


def _text_options(body: GenerationRequest, *, add_special_tokens: bool) -> TextOptions:
    """`add_special_tokens`: where the request does not say."""
    keep = None
    if body.truncate_prompt_tokens is not None:
        answer = max(body.answer_max_tokens() or 1, 1)
        keep = Keep(body.truncate_prompt_tokens, body.truncation_side or "left", answer)
    given = body.add_special_tokens
    return TextOptions(add_special_tokens if given is None else given, keep)
