"""Answers under a request's grammar, without a model: tokens are drawn at random among those that
the grammar allows, and the parser of the request reads them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np

from swell.cluster.api.chat.convert import conversation, to_generation_request
from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.text.parsers.base import Parser
from swell.cluster.text.parsers.deltas import Message, collect
from swell.cluster.text.parsers.detection import detect_tools
from swell.cluster.text.prompt.chat_template import ChatTemplate
from swell.cluster.text.prompt.model_formats import AnswerFormat, ModelFormats
from swell.cluster.text.schema.decode import decode
from swell.configs.schema import ServeConfig
from swell.worker.sample.vocabulary import load_vocabulary
from tests.model_kinds import MODEL_KINDS, model_kind

WITH_TOOLS = [name for name in MODEL_KINDS if detect_tools(model_kind(name).template)]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"at": {"enum": ["sky", "sea"]}, "<think>": {"type": "boolean"}},
                "required": ["at"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "wait"}},
]
SCHEMA = {
    "type": "object",
    "properties": {"mark": {"enum": ["<tool_call>", "<think>", "</think>", "[TOOL_CALLS]"]}},
    "required": ["mark"],
    "additionalProperties": False,
}
MAX_TOKENS = 3000


class GrammarSample(msgspec.Struct):
    prompt: str
    ids: list[int]
    ended: bool
    text_of: Callable[[list[int]], str]
    make_parser: Callable[[], Parser]

    def read(self, tokens: int | None = None, *, stream: bool = False) -> Message:
        """Returns the message that the parser reads from the first `tokens` tokens."""
        text = self.text_of(self.ids[:tokens])
        parser, parts = self.make_parser(), []
        for piece in text if stream else [text]:
            parts += parser.push(piece)
        return collect([*parts, *parser.flush()])

    @property
    def message(self) -> Message:
        return self.read()


@cache
def formats(name: str) -> ModelFormats:
    return ModelFormats(model_kind(name).tokenizer, model_kind(name).template, ServeConfig())


def format_of(name: str, body: ChatCompletionRequest, prompt: str) -> AnswerFormat:
    return formats(name).of(to_generation_request(body, {}), conversation(body), prompt)


def request(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "How is it?"}], **fields}
    return decode(msgspec.json.encode(body), ChatCompletionRequest)


def walk(
    name: str,
    body: ChatCompletionRequest,
    seed: int = 0,
    *,
    likes: tuple[str, ...] = (),
    max_tokens: int = MAX_TOKENS,
) -> GrammarSample:
    """Samples an answer. Tokens in `likes` are chosen wherever the grammar allows them."""
    from llguidance import LLMatcher

    one = model_kind(name)
    tokenizer, ends = one.tokenizer, set(one.end_ids)
    prompt = ChatTemplate(tokenizer, name).render(body.messages, conversation(body).template)
    answer = format_of(name, body, prompt[-40:])
    assert answer.grammar is not None, "the request has a grammar"
    matcher = LLMatcher(load_vocabulary(str(one.folder())), answer.grammar().lark, log_level=0)
    rng, ids = random.Random(seed), []
    liked = {tokenizer.convert_tokens_to_ids(text) for text in likes}
    closing = {tokenizer.convert_tokens_to_ids(text) for text in ('"', "}", "]")}
    ended = False
    while len(ids) < max_tokens and not ended:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed, (tokenizer.decode(ids), matcher.get_error())
        some = sorted(liked.intersection(allowed))
        if not some and ends.intersection(allowed) and rng.random() < 0.4:
            some = sorted(ends.intersection(allowed))
        token = rng.choice(some or sorted(closing.intersection(allowed)) or allowed)
        ended = token in ends
        if not ended:
            assert matcher.consume_token(token), matcher.get_error()
            ids.append(token)
    skip = not answer.keeps_special_tokens
    text_of = partial(
        tokenizer.decode, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    return GrammarSample(prompt, ids, ended, text_of, answer.make_parser)
