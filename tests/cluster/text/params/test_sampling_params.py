"""Sampling parameters: allowed values, refusals and their messages, and the values that an engine
receives."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.sampling_params import RepetitionDetection, SamplingParams
from swell.cluster.text.params.validate_params import (
    MAX_BIASED_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    validate,
)
from swell.configs.error_text import shown
from swell.engine.wire import EngineCoreRequest
from tests.support.core_requests import core_request

VOCAB = 100

REFUSED: list[tuple[str, Any, str, str]] = [
    ("temperature", -0.1, "-0.1", "0 <="),
    ("temperature", math.nan, "nan", "<= 100"),
    ("temperature", math.inf, "inf", "<= 100"),
    ("temperature", 10**400, "an integer of", "<= 100"),
    ("temperature", "hot", "'hot'", "<= 100"),
    ("temperature", True, "True", "<= 100"),
    ("top_p", -0.1, "-0.1", "0 <= top_p <= 1"),
    ("top_p", 1.5, "1.5", "<= 1"),
    ("top_p", math.nan, "nan", "<= 1"),
    ("min_p", -0.5, "-0.5", "0 <= min_p"),
    ("min_p", 1.01, "1.01", "<= 1"),
    ("top_k", -2, "-2", "-1"),
    ("top_k", 2**31, str(2**31), str(2**31 - 1)),
    ("top_k", 1.5, "1.5", "integer"),
    ("seed", 2**63, str(2**63), str(2**63 - 1)),
    ("seed", 10**300, "an integer of", str(2**63 - 1)),
    ("max_tokens", 0, "0", "at least 1"),
    ("max_tokens", -5, "-5", "at least 1"),
    ("max_tokens", False, "False", "integer"),
    ("min_tokens", -1, "-1", "at least 0"),
    ("repetition_detection", 3, "3", "max_pattern_size"),
    ("ignore_eos", 1, "1", "true or false"),
    ("stop", 5, "5", "string"),
    ("stop", "", "''", "non-empty"),
    ("stop", ["x"] * (MAX_STOP_STRINGS + 1), str(MAX_STOP_STRINGS + 1), str(MAX_STOP_STRINGS)),
    ("stop_token_ids", "7", "'7'", "list"),
    ("stop_token_ids", [1] * 257, "257", "256"),
    ("presence_penalty", 2.5, "2.5", "<= 2"),
    ("frequency_penalty", -2.01, "-2.01", "-2 <="),
    ("repetition_penalty", 0, "0", "0.01 <="),
    ("repetition_penalty", 1e-300, "1e-300", "0.01 <="),
    ("repetition_penalty", math.inf, "inf", "<= 100"),
    ("logit_bias", [1], "[1]", "map token ids"),
    ("logit_bias", dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0), "1025", "1024"),
    ("logit_bias", {VOCAB: 1.0}, "100", "0 .. 99"),
    ("logit_bias", {-1: 1.0}, "-1", "0 .. 99"),
    ("bad_words", ["x"] * 257, "257", "256"),
    ("bad_words", {"x": 1}, "{'x': 1}", "list of strings"),
    ("allowed_token_ids", [], "[]", "at least one"),
    ("allowed_token_ids", "1", "'1'", "list"),
    ("logprobs", MAX_LOGPROBS + 1, "21", "20"),
    ("logprobs", True, "True", "integer"),
    ("prompt_logprobs", -2, "-2", "between -1 and 20"),
    ("n", 0, "0", str(MAX_N)),
    ("n", MAX_N + 1, str(MAX_N + 1), str(MAX_N)),
    ("best_of", MAX_N + 1, str(MAX_N + 1), str(MAX_N)),
]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_pattern_size": 257}, "max_pattern_size=257 must be between 0 and 256"),
        ({"max_pattern_size": -1}, "max_pattern_size=-1 must be between 0 and 256"),
        ({"max_pattern_size": 4, "min_pattern_size": 5}, "size=5 is above repetition_detection"),
        ({"max_pattern_size": 4}, "min_count=0 must be between 2 and 256"),
        ({"max_pattern_size": 4, "min_count": 257}, "min_count=257 must be between 2 and 256"),
        ({"min_count": 3}, "min_count=3 needs repetition_detection.max_pattern_size"),
        ({"max_pattern_size": 4, "min_count": True}, "min_count=True must be an integer"),
    ],
)
def test_a_repetition_that_cannot_be_detected_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)) as caught:
        validate(SamplingParams(repetition_detection=RepetitionDetection(**fields)), vocab_size=9)
    assert str(caught.value.param).startswith("repetition_detection.")


@pytest.mark.parametrize(("field", "value", "text", "limit"), REFUSED)
def test_refusal_names_field_value_and_limit(field: str, value: Any, text: str, limit: str) -> None:
    with pytest.raises(BadRequest) as caught:
        validate(SamplingParams(**{field: value}), vocab_size=VOCAB)
    error = caught.value
    assert error.param == field
    assert field in error.message
    assert text in error.message
    assert limit in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("stop", ["a", ""], "stop[1]"),
        ("stop", ["a", "b" * (MAX_STOP_CHARS + 1)], "stop[1]"),
        ("bad_words", ["a", ""], "bad_words[1]"),
        ("allowed_token_ids", [0, VOCAB], "allowed_token_ids[1]"),
        ("stop_token_ids", [1, VOCAB], "stop_token_ids[1]"),
        ("stop_token_ids", [-1], "stop_token_ids[0]"),
        ("stop_token_ids", [1, True], "stop_token_ids[1]"),
    ],
)
def test_refusal_names_the_element(field: str, value: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        validate(SamplingParams(**{field: value}), vocab_size=VOCAB)
    assert caught.value.param == param


def test_min_above_max_names_both() -> None:
    with pytest.raises(BadRequest, match="min_tokens=5 is above max_tokens=4"):
        validate(SamplingParams(min_tokens=5, max_tokens=4), vocab_size=VOCAB)
    with pytest.raises(BadRequest, match=r"best_of=2 is below n=3"):
        validate(SamplingParams(n=3, best_of=2), vocab_size=VOCAB)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, max_tokens=None, min_tokens=9),
        SamplingParams(n=2, best_of=3, logprobs=0, prompt_logprobs=20, logit_bias={0: -100.0}),
        SamplingParams(repetition_penalty=0.1, presence_penalty=-2, frequency_penalty=2),
        SamplingParams(allowed_token_ids=list(range(VOCAB)), bad_words=["x"]),
        SamplingParams(temperature=MAX_TEMPERATURE, seed=-(2**63), stop="\n"),
        SamplingParams(stop=["x"] * MAX_STOP_STRINGS, stop_token_ids=[0, VOCAB - 1]),
    ],
)
def test_values_at_the_limits_are_accepted(params: SamplingParams) -> None:
    validate(params, vocab_size=VOCAB)


def core(params: SamplingParams, **changes: Any) -> EngineCoreRequest:
    fields = {"prompt_token_ids": [1, 2], "max_tokens": 7, "eos_token_ids": [9], **changes}
    return core_request(params, external_req_id="cmpl-1", **fields)


def test_core_request_has_the_same_parameters_in_tokens() -> None:
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=3, min_tokens=2, stop_token_ids=[4]
    )
    request = core(params, priority=-2, cache_salt="s", data_parallel_rank=1)
    assert (request.prompt_token_ids, request.max_tokens, request.min_tokens) == ([1, 2], 7, 2)
    assert (request.eos_token_ids, request.stop_token_ids) == ([9], [4])
    assert (request.priority, request.cache_salt, request.data_parallel_rank) == (-2, "s", 1)
    sampler = request.sampler
    assert (sampler.temperature, sampler.top_p, sampler.top_k) == (0.5, 0.9, 0)
    assert (sampler.min_p, sampler.seed) == (0.1, 3)
    encoded = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(encoded, type=EngineCoreRequest) == request


def test_equal_external_ids_get_different_internal_ones() -> None:
    first, second = core(SamplingParams()), core(SamplingParams())
    assert first.request_id != second.request_id
    assert first.external_req_id == second.external_req_id == "cmpl-1"
    head, _, tail = first.request_id.rpartition("-")
    assert head == "cmpl-1"
    assert len(tail) == 16
    int(tail, 16)


def test_a_request_without_a_seed_receives_one_of_63_bits() -> None:
    seeds = {core(SamplingParams()).sampler.seed for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert core(SamplingParams(seed=-1)).sampler.seed == 2**63 - 1


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert core(SamplingParams(temperature=temperature)).sampler.temperature == 0.0


def test_ignored_eos_is_not_sent() -> None:
    assert core(SamplingParams(ignore_eos=True)).eos_token_ids == []


def test_shown_values_are_short() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in ["x" * 10**6, list(range(10**5)), {"a": {"b": "c" * 10**5}}, 10**5000, deep]:
        assert len(shown(value)) < 120
    assert shown([1, 2]) == "[1, 2]"
