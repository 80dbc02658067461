"""Every field of a request is validated before an engine accepts it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from swell.cluster.text.params import sampling_params as ingress
from swell.cluster.text.params import validate_params as limits
from swell.configs.lora import Adapter
from swell.engine.scheduling import request_validation as validate
from swell.engine.wire import EngineCoreRequest, FinishReason, RepetitionPattern
from swell.worker.sampler_wire import (
    GRAMMAR_LIMITS,
    Grammar,
    PoolingParams,
    PromptEmbeds,
    SamplerParams,
)
from tests.engine.executor.fake_worker import make_core, run, token_ids
from tests.support.core_requests import core_request

VOCAB, LENGTH = 50, 64
NAN, INF = math.nan, math.inf
GOOD = EngineCoreRequest("r", [1, 2, 3], SamplerParams(), 8)

OF_REQUEST: list[tuple[str, Any]] = [
    ("prompt_token_ids", [1, VOCAB]),
    ("prompt_token_ids", [-1]),
    ("output_token_ids", [VOCAB]),
    ("output_token_ids", [1] * (LENGTH + 1)),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1] * 5000),
    ("eos_token_ids", [1] * 5000),
    ("max_tokens", 0),
    ("max_tokens", -(2**70)),
    ("min_tokens", -1),
    ("min_tokens", 2**63),
    ("priority", 2**63),
    ("failed_attempts", -1),
    ("attempt", 0),
    ("waited_s", -0.1),
    ("waited_s", NAN),
    ("waited_s", INF),
    ("request_id", "r" * 5000),
    ("cache_salt", "s" * 5000),
    ("external_req_id", "e" * 5000),
    ("trace_headers", {str(i): "" for i in range(65)}),
    ("trace_headers", {"a": "b" * 70_000}),
    ("cache_salt", "\ud800"),
    ("adapter", Adapter("x", "/x", "x")),
    ("adapter", Adapter("\ud800", "/x", "x")),
    ("adapter", Adapter("x", "/x" * 5000, "x")),
    ("adapter", Adapter("x", "/x", "x" * 5000)),
    ("prompt_embeds", PromptEmbeds("F32", 4, b"123")),
    ("prompt_embeds", PromptEmbeds("F32", 0, b"")),
    ("prompt_embeds", PromptEmbeds("BF16", -4, bytes(48))),
    ("repetition", RepetitionPattern(0, 4, 2)),
    ("repetition", RepetitionPattern(5, 4, 2)),
    ("repetition", RepetitionPattern(1, 5000, 2)),
    ("repetition", RepetitionPattern(1, 4, 1)),
    ("repetition", RepetitionPattern(1, 4, 5000)),
    *(("hand_over", value) for value in ("../x", "0" * 31, "0" * 32)),  # max_tokens is not 1
    *(("handed_over", value) for value in ("../x", "0" * 33)),
]
OF_SAMPLER: list[tuple[str, Any]] = [
    *((name, value) for name in ("temperature", "top_p", "min_p") for value in (NAN, INF, -0.1)),
    *(("repetition_penalty", value) for value in (NAN, INF, 0.0, -1.0, 1e-300, 1e39)),
    *((f"{name}_penalty", v) for name in ("frequency", "presence") for v in (NAN, INF, 1e39)),
    ("top_p", 1.1),
    ("min_p", 1.1),
    ("top_k", -1),
    ("top_k", 2**63),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 5000)),
    *(("logit_bias", {3: value}) for value in (NAN, INF, -INF, 1e39)),
    ("logit_bias", {VOCAB: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", dict.fromkeys(range(5000), 1.0)),
    ("bad_words", [[1], [2, VOCAB]]),
    ("bad_words", [[VOCAB, 2]]),
    ("bad_words", [[-1]]),
    ("bad_words", [[]]),
    ("bad_words", [[1]] * 5000),
    ("bad_words", [[1] * 70_000]),
    ("allowed_token_ids", [VOCAB]),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [1] * (VOCAB + 1)),
    ("grammar", Grammar("x" * 5_000_000)),
    ("pooling", PoolingParams()),  # with `max_tokens` above 0
    ("routed_experts", True),  # the model records none
]


def changed(name: str, value: Any, of_sampler: bool) -> EngineCoreRequest:
    if not of_sampler:
        return msgspec.structs.replace(GOOD, **{name: value})
    return msgspec.structs.replace(GOOD, sampler=SamplerParams(**{name: value}))


CASES = [(*case, False) for case in OF_REQUEST] + [(*case, True) for case in OF_SAMPLER]


@pytest.mark.parametrize(("name", "value", "of_sampler"), CASES)
def test_requests_that_no_worker_could_run_are_refused_at_once(name, value, of_sampler) -> None:
    core, bad = make_core(), changed(name, value, of_sampler)
    assert core.add_request(GOOD, b"c") is None
    other = msgspec.structs.replace(bad, request_id=bad.request_id + "2")
    answer = core.add_request(other, b"c")
    assert answer is not None and answer.finish_reason is FinishReason.ERROR
    assert name in str(answer.stop_reason) and len(str(answer.stop_reason)) < 300
    assert len(token_ids(run(core)["r"])) == 8


def test_every_field_has_a_case() -> None:
    """Every field has a case; a new field needs one that says which values are valid."""
    free = {"sampler", "data_parallel_rank", "skip_prefix_cache", "keep_blocks", "prefix_hint"}
    assert {name for name, _ in OF_REQUEST} | free == set(EngineCoreRequest.__struct_fields__)
    assert {name for name, _ in OF_SAMPLER} == set(SamplerParams.__struct_fields__)


def test_the_whole_vocabulary_is_reported_for_few_positions() -> None:
    vocab, most = 5000, limits.MAX_VOCABULARY_LOGPROBS // 5000
    for count, fits in ((most, True), (2 * most + 20, False)):
        params = limits.resolve_prompt_logprobs(
            ingress.SamplingParams(prompt_logprobs=-1), 1, vocab
        )
        core = core_request(params, prompt_token_ids=[1] * count, max_tokens=9)
        assert (validate.invalid_reason(core, vocab, 4 * LENGTH) is None) == fits


def test_requests_that_the_ingress_accepts_pass() -> None:
    """Requests that the ingress accepts pass. Its limits lie within the engine's, so that clients
    get a 400 with the field's name."""
    vocab = 5000
    params = ingress.SamplingParams(
        temperature=limits.MAX_TEMPERATURE,
        top_k=limits.RANGES["top_k"].high,
        seed=-(2**63),
        min_tokens=9,
        stop_token_ids=[vocab - 1] * limits.MAX_STOP_TOKEN_IDS,
        presence_penalty=limits.RANGES["presence_penalty"].low,
        frequency_penalty=limits.RANGES["frequency_penalty"].high,
        repetition_penalty=limits.RANGES["repetition_penalty"].low,
        logit_bias=dict.fromkeys(range(limits.MAX_BIASED_TOKENS), limits._BIAS.low),
        allowed_token_ids=list(range(vocab)),
        logprobs=limits.MAX_LOGPROBS,
        prompt_logprobs=limits.MAX_LOGPROBS,
    )
    for one in (
        params,
        msgspec.structs.replace(params, repetition_penalty=100.0, temperature=1e-9),
    ):
        limits.validate(one, vocab_size=vocab)
        core = core_request(
            one,
            external_req_id="x" * 128,
            prompt_token_ids=[0, vocab - 1],
            max_tokens=9,
            eos_token_ids=[vocab + 7],  # a token of the tokenizer only, which is never sampled
            bad_words=[[1] * 100] * (2 * limits.MAX_BAD_WORDS),
            priority=2**31 - 1,
        )
        grammar = Grammar("x" * GRAMMAR_LIMITS["max_grammar_size"])
        core = msgspec.structs.replace(
            core, sampler=msgspec.structs.replace(core.sampler, grammar=grammar)
        )
        assert validate.invalid_reason(core, vocab, LENGTH) is None
