"""Validates all fields of a request before the engine accepts it. Pure.

The ingress refuses invalid values first, field by field, with a 400; its limits lie within these. A
request that passes here cannot break a worker: every token is in the vocabulary, every number is
finite and in its range, and every list is limited.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from math import isfinite

from swell.configs.error_text import shown
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import GRAMMAR_LIMITS, SamplerParams

MAX_END_TOKENS = 4096
"""Maximum number of ids in `eos_token_ids` and in `stop_token_ids`."""
MAX_BIASED_TOKENS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 1 << 16
"""Maximum number of tokens of all bad words together: a step reads each of them."""
MAX_LOGPROBS = 1024
MAX_PROMPT_LOGPROBS = 1 << 20
"""Maximum number of values of all positions of a prompt, if each has more than `MAX_LOGPROBS`."""
MAX_GRAMMAR_CHARS = 4 * GRAMMAR_LIMITS["max_grammar_size"]
MAX_PATTERN_TOKENS = 1024
"""Maximum size of a pattern, and number of its copies, that are looked for after each token."""
MAX_TEXT_CHARS = 4096
"""Maximum length of an id or a salt."""
_OF_ADAPTER = ("name", "folder", "digest")
MAX_HEADERS = 64
MAX_HEADER_CHARS = 1 << 16
"""Maximum length of a trace header with its name: more than HTTP servers accept."""
LARGEST = 1e6
"""Limit of temperatures, penalties and biases: beyond it float32 logits overflow."""
SMALLEST = 1e-6
"""Lower limit of divisors."""
LONGEST_WAIT_S = 1e9
INT64 = 1 << 63
HANDOVER_NAME = re.compile("[0-9a-f]{32}")


def invalid_reason(request: EngineCoreRequest, vocab_size: int, max_model_len: int) -> str | None:
    """Returns why the request can never run (field, value and limit), or None if it can."""
    for found in _invalid_reasons(request, vocab_size, max_model_len):
        return found
    return None


def wrong_kind(
    request: EngineCoreRequest, *, samples: bool, records_experts: bool = False
) -> str | None:
    """Returns why a model cannot run the request at all, or None. `samples`: whether the model
    samples tokens. `records_experts`: whether it records which experts computed them."""
    if samples and request.sampler.pooling is not None:
        return "pooling: the model generates text, so it cannot pool"
    if not samples and request.sampler.pooling is None:
        return "pooling is missing: the model only pools, so it cannot generate text"
    if request.sampler.routed_experts and not records_experts:
        return "routed_experts=True needs model.routed_experts=true"
    return None


def _invalid_reasons(
    request: EngineCoreRequest, vocab_size: int, max_model_len: int
) -> Iterator[str]:
    """Yields all reasons, the cheapest checks first."""
    yield from _counts(request, max_model_len)
    yield from _pooling(request)
    yield from _handover(request)
    yield from _prompt_embeds(request)
    yield from _adapter(request)
    yield from _repetition(request)
    yield from _texts(request)
    for name in ("prompt_token_ids", "output_token_ids", "stop_token_ids"):
        yield from _out_of_vocabulary(name, getattr(request, name), vocab_size)
    yield from _numbers(request.sampler)
    yield from _tokens(request.sampler, vocab_size)
    yield from _prompt_logprobs(request, vocab_size)


def _counts(request: EngineCoreRequest, max_model_len: int) -> Iterator[str]:
    prompt = len(request.prompt_token_ids)
    if not prompt:
        yield "the prompt has no tokens"
    if prompt + request.max_tokens > max_model_len:
        yield (
            f"{prompt} prompt tokens and max_tokens={request.max_tokens} "
            f"exceed the maximum context length of {max_model_len} tokens"
        )
    samples = request.sampler.pooling is None
    yield from _range("max_tokens", request.max_tokens, int(samples), max_model_len * samples)
    yield from _range("min_tokens", request.min_tokens, 0, INT64 - 1)
    yield from _range("failed_attempts", request.failed_attempts, 0, INT64 - 1)
    yield from _range("attempt", request.attempt, 1, INT64 - 1)
    yield from _range("priority", request.priority, -INT64, INT64 - 1)
    yield from _finite("waited_s", request.waited_s, 0, LONGEST_WAIT_S)
    yield from _too_long("output_token_ids", request.output_token_ids, max_model_len)
    for name in ("eos_token_ids", "stop_token_ids"):
        yield from _too_long(name, getattr(request, name), MAX_END_TOKENS)


def _pooling(request: EngineCoreRequest) -> Iterator[str]:
    params = request.sampler.pooling
    if params is not None:
        if request.output_token_ids:
            yield "output_token_ids: a pooling request has no output tokens"
        yield from _range("dimensions", params.dimensions, 0, INT64 - 1)
        yield from _range("segment_start", params.segment_start, 0, len(request.prompt_token_ids))


def _handover(request: EngineCoreRequest) -> Iterator[str]:
    """Checks handover names, which become file names."""
    for name in ("hand_over", "handed_over"):
        if (value := getattr(request, name)) and not HANDOVER_NAME.fullmatch(value):
            yield f"{name}={shown(value)} must have 32 hexadecimal digits"
    if (request.hand_over or request.handed_over) and request.output_token_ids:
        yield "output_token_ids: a request with hand_over has only a prompt"
    if request.hand_over and request.max_tokens != 1:
        yield f"max_tokens={request.max_tokens} must be 1 for a request with hand_over"
    if request.hand_over and request.handed_over:
        yield "hand_over: the request was already handed over"


def _prompt_embeds(request: EngineCoreRequest) -> Iterator[str]:
    """Checks the prompt embeddings, except their width: only the worker knows the model's hidden
    size."""
    embeds, prompt = request.prompt_embeds, len(request.prompt_token_ids)
    if embeds is None:
        return
    if embeds.first:
        yield (
            f"prompt_embeds begins at token {embeds.first}; a request needs the embeddings of its "
            "whole prompt"
        )
    if embeds.width < 1 or len(embeds.data) != prompt * embeds.row_bytes:
        yield (
            f"prompt_embeds holds {len(embeds.data)} bytes; {prompt} embeddings of {embeds.width} "
            f"numbers in {embeds.dtype} have {prompt * embeds.row_bytes}"
        )
    if any(request.prompt_token_ids):
        yield "prompt_token_ids: with prompt_embeds, each prompt token must be 0"
    if request.cache_salt is None:
        yield "cache_salt is missing: it keeps the KV of prompt_embeds apart from that of tokens"


def _adapter(request: EngineCoreRequest) -> Iterator[str]:
    if request.adapter is not None and request.cache_salt is None:
        yield "cache_salt is missing: it keeps the KV of an adapter apart from that of the model"


def _repetition(request: EngineCoreRequest) -> Iterator[str]:
    pattern = request.repetition
    if pattern is not None:
        yield from _range("repetition.max_size", pattern.max_size, 1, MAX_PATTERN_TOKENS)
        yield from _range("repetition.min_size", pattern.min_size, 1, pattern.max_size)
        yield from _range("repetition.min_count", pattern.min_count, 2, MAX_PATTERN_TOKENS)


def _texts(request: EngineCoreRequest) -> Iterator[str]:
    texts = {
        "request_id": request.request_id,
        "cache_salt": request.cache_salt or "",
        "external_req_id": request.external_req_id or "",
    }
    if request.adapter is not None:
        texts |= {f"adapter.{name}": getattr(request.adapter, name) for name in _OF_ADAPTER}
    for name, text in texts.items():
        if len(text) > MAX_TEXT_CHARS:
            yield f"{name} has {len(text)} characters; the limit is {MAX_TEXT_CHARS}"
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            yield f"{name} contains a lone surrogate, which is not valid Unicode"
    headers = request.trace_headers or {}
    if len(headers) > MAX_HEADERS:
        yield f"trace_headers has {len(headers)} headers; the limit is {MAX_HEADERS}"
    longest = max((len(name) + len(text) for name, text in headers.items()), default=0)
    if longest > MAX_HEADER_CHARS:
        yield (
            f"trace_headers has a name or value of {longest} characters; the limit is "
            f"{MAX_HEADER_CHARS}"
        )


def _numbers(sampler: SamplerParams) -> Iterator[str]:
    yield from _finite("temperature", sampler.temperature, 0, LARGEST)
    yield from _finite("top_p", sampler.top_p, 0, 1)
    yield from _finite("min_p", sampler.min_p, 0, 1)
    yield from _finite("repetition_penalty", sampler.repetition_penalty, SMALLEST, LARGEST)
    for name in ("frequency_penalty", "presence_penalty"):
        yield from _finite(name, getattr(sampler, name), -LARGEST, LARGEST)
    yield from _range("top_k", sampler.top_k, 0, INT64 - 1)
    yield from _range("seed", sampler.seed, -INT64, 2 * INT64 - 1)
    yield from _range("logprobs", sampler.logprobs or 0, 0, MAX_LOGPROBS)
    if sampler.grammar is not None and len(sampler.grammar.lark) > MAX_GRAMMAR_CHARS:
        chars = len(sampler.grammar.lark)
        yield f"grammar has {chars} characters; the limit is {MAX_GRAMMAR_CHARS}"


def _prompt_logprobs(request: EngineCoreRequest, vocab_size: int) -> Iterator[str]:
    """Checks the number of prompt logprobs: those of the whole vocabulary are allowed only for few
    positions."""
    top = request.sampler.prompt_logprobs or 0
    yield from _range("prompt_logprobs", top, 0, max(MAX_LOGPROBS, vocab_size))
    num_logprobs = top * len(request.prompt_token_ids)
    if top > MAX_LOGPROBS and num_logprobs > MAX_PROMPT_LOGPROBS:
        yield (
            f"prompt_logprobs={top} of {len(request.prompt_token_ids)} prompt tokens would return "
            f"{num_logprobs} log probabilities; the limit is {MAX_PROMPT_LOGPROBS}"
        )


def _tokens(sampler: SamplerParams, vocab_size: int) -> Iterator[str]:
    bias, words, allowed = sampler.logit_bias, sampler.bad_words, sampler.allowed_token_ids
    for name, given, limit in (
        ("logit_bias", bias, MAX_BIASED_TOKENS),
        ("bad_words", words, MAX_BAD_WORDS),
        ("allowed_token_ids", allowed, vocab_size),
    ):
        yield from _too_long(name, given, limit)
    yield from _out_of_vocabulary("logit_bias", bias, vocab_size)
    yield from _out_of_vocabulary("allowed_token_ids", allowed, vocab_size)
    for token, amount in bias.items():
        yield from _finite(f"logit_bias[{token}]", amount, -LARGEST, LARGEST)
    for index, word in enumerate(words):
        if not word:
            yield f"bad_words[{index}] has no tokens"
        yield from _out_of_vocabulary(f"bad_words[{index}]", word, vocab_size)
    count = sum(map(len, words))
    if count > MAX_BAD_WORD_TOKENS:
        yield f"bad_words has {count} tokens; the limit is {MAX_BAD_WORD_TOKENS}"


def _out_of_vocabulary(name: str, token_ids: Collection[int], vocab_size: int) -> Iterator[str]:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        token = next(token for token in token_ids if not 0 <= token < vocab_size)
        yield f"{name}: token {token} is outside the vocabulary, 0 .. {vocab_size - 1}"


def _too_long(name: str, given: Collection[object], limit: int) -> Iterator[str]:
    if len(given) > limit:
        yield f"{name} has {len(given)} elements; the limit is {limit}"


def _range(name: str, value: int, low: int, high: int) -> Iterator[str]:
    if not low <= value <= high:
        yield f"{name}={value} is outside {low} .. {high}"


def _finite(name: str, value: float, low: float, high: float) -> Iterator[str]:
    if not (isfinite(value) and low <= value <= high):
        yield f"{name}={value} is outside {low:g} .. {high:g}"
