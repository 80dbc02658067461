"""Validates `SamplingParams`: each error names field, value and limit."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import NamedTuple

import msgspec

from swell.cluster.text.errors import BadRequest, Field, bad_value
from swell.cluster.text.params.sampling_params import RepetitionDetection, SamplingParams
from swell.configs.error_text import shown

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_CHARS_TOTAL = 4096
"""Limit for all stop strings of a request: each character is a node of the automaton that finds
them."""
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS_TOTAL = 16_384
"""Limit for all bad words of a request: the engine searches for their tokens at every step."""
MAX_TEMPERATURE = 100.0
MAX_N = 128
"""Limit on the answers to one prompt."""
MAX_LOGPROBS = 20
"""Limit on the top tokens that are returned with each token."""
WHOLE_VOCABULARY = -1
"""A value of `prompt_logprobs`: the log probability of every token at each prompt token."""
MAX_VOCABULARY_LOGPROBS = 512 * 1024
"""Limit on the values with `WHOLE_VOCABULARY`, over all prompt tokens and answers: 40 MB of
JSON."""
MAX_BIASED_TOKENS = 1024
MAX_PATTERN_SIZE = 256
"""Limit on the tokens of a pattern, and on its copies, that an engine looks for after each
token."""


class Numbers(NamedTuple):
    """The range of numbers of a field, including both limits."""

    low: float
    high: float

    def check(self, name: str, value: object) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and self.low <= value <= self.high):  # type: ignore[operator]  # NaN is not
            head = f"{name}={shown(value)} is out of range: {self.low:g} <= "
            raise BadRequest([head, Field(name), f" <= {self.high:g}"], name)


class Integers(NamedTuple):
    """The range of integers of a field, including both limits."""

    low: int
    high: int | None
    optional: bool = False
    """Whether None is allowed too."""

    def check(self, name: str, value: object) -> None:
        if value is None and self.optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_value(name, value, "must be an integer")
        if value < self.low or (self.high is not None and value > self.high):
            limit = f"between {self.low} and {self.high}"
            if self.high is None:
                limit = f"at least {self.low}"
            raise bad_value(name, value, f"must be {limit}")


RANGES: Mapping[str, Numbers | Integers] = {
    "temperature": Numbers(0, MAX_TEMPERATURE),
    "top_p": Numbers(0, 1),
    "min_p": Numbers(0, 1),
    "top_k": Integers(-1, 2**31 - 1),
    "presence_penalty": Numbers(-2.0, 2.0),
    "frequency_penalty": Numbers(-2.0, 2.0),
    # It is a divisor: logits divided by a number near zero are infinite.
    "repetition_penalty": Numbers(0.01, 100.0),
    "seed": Integers(-(2**63), 2**63 - 1, optional=True),
    "max_tokens": Integers(1, None, optional=True),
    "min_tokens": Integers(0, None),
    "stream_interval": Integers(1, 2**31 - 1, optional=True),
    "n": Integers(1, MAX_N),
    "best_of": Integers(1, MAX_N, optional=True),
    "logprobs": Integers(0, MAX_LOGPROBS, optional=True),
    "prompt_logprobs": Integers(WHOLE_VOCABULARY, MAX_LOGPROBS, optional=True),
}
FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "return_routed_experts",
    "skip_special_tokens",
)
_BIAS = Numbers(-100.0, 100.0)


def validate(params: SamplingParams, *, vocab_size: int) -> None:
    """Checks every field; raises `BadRequest` naming field, value and limit."""
    check_ranges(params)
    _check_strings("stop", params.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS_TOTAL)
    _check_strings("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS_TOTAL)
    _check_tokens("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS, vocab_size)
    if params.allowed_token_ids is not None:
        _check_tokens("allowed_token_ids", params.allowed_token_ids, vocab_size, vocab_size)
    if params.allowed_token_ids == []:
        raise BadRequest(
            "allowed_token_ids=[] allows no token; list at least one, or leave it out to allow all",
            "allowed_token_ids",
        )
    _check_bias(params.logit_bias, vocab_size)
    _check_repetition(params.repetition_detection)
    for name in FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise bad_value(name, getattr(params, name), "must be true or false")


def check_ranges(params: SamplingParams) -> None:
    """Checks the fields that are numbers. Raises `BadRequest`."""
    for name, allowed in RANGES.items():
        allowed.check(name, getattr(params, name))
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        head = f"min_tokens={params.min_tokens} is above "
        raise BadRequest([head, Field("max_tokens"), f"={params.max_tokens}"], "min_tokens")
    if params.best_of is not None and params.best_of < params.n:
        raise BadRequest(
            f"best_of={params.best_of} is below n={params.n}; set best_of to at least n",
            "best_of",
        )


def check_num_children(prompts: int, params: SamplingParams, limit: int) -> None:
    """Raises `BadRequest` for too many answers: each is a separate request to the engines, and all
    begin at once."""
    each, field = (params.n, "n") if params.best_of is None else (params.best_of, "best_of")
    if isinstance(each, int) and prompts * each > limit:
        raise BadRequest(
            f"{prompts} prompts with {field}={shown(each)} need {shown(prompts * each)} answers; "
            f"at most serve.max_children={limit} are allowed in one request",
            field if each > 1 else "prompt",
        )


def resolve_prompt_logprobs(
    params: SamplingParams, num_prompt_tokens: int, vocab_size: int
) -> SamplingParams:
    """Replaces `prompt_logprobs=-1` by the number of tokens in the vocabulary. `num_prompt_tokens`
    counts all prompts together. Raises `BadRequest` if the result is too large."""
    if params.prompt_logprobs != WHOLE_VOCABULARY:
        return params
    count = num_prompt_tokens * params.num_children * vocab_size
    if count > MAX_VOCABULARY_LOGPROBS:
        raise BadRequest(
            f"prompt_logprobs=-1 of {num_prompt_tokens} prompt tokens and a vocabulary of "
            f"{vocab_size} are {count} log probabilities for {params.num_children} "
            f"answers; at most {MAX_VOCABULARY_LOGPROBS} are returned. Send a shorter prompt, or "
            f"prompt_logprobs of at most {MAX_LOGPROBS}",
            "prompt_logprobs",
        )
    return msgspec.structs.replace(params, prompt_logprobs=vocab_size)


def check_token_ids(name: str, token_ids: list[int], vocab_size: int) -> None:
    """Raises `BadRequest` for the first id outside 0 .. vocab_size - 1."""
    if not token_ids or (
        set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size
    ):
        return
    for index, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            known = f"0 .. {vocab_size - 1}, {vocab_size} in all"
            rule = f"is not a token id of this model; valid ids are {known}"
            raise bad_value(f"{name}[{index}]", token, rule)


def num_utf8_bytes(name: str, text: str) -> int:
    """Returns the length of a text in bytes. Raises `BadRequest` if it is not valid Unicode."""
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise BadRequest(
            f"{name} contains a lone surrogate, which is not valid Unicode", name
        ) from None


def check_length(path: str, items: Sized, what: str, limit: int) -> None:
    """Raises `BadRequest` for a list, or another sized value, that is too long."""
    if len(items) > limit:
        raise BadRequest(f"{path} holds {len(items)} {what}; at most {limit} are allowed", path)


def check_total_chars(name: str, texts: list[str], limit: int) -> None:
    """Raises `BadRequest` for strings that together have more characters than `limit`."""
    chars = sum(map(len, texts))
    if chars > limit:
        raise BadRequest(
            f"{name} has {chars} characters in total; at most {limit} are allowed", name
        )


def _check_strings(name: str, value: object, limit: int, limit_chars: int) -> None:
    """Checks a string or a list of strings."""
    if value == []:
        return
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise bad_value(name, value, "must be a string or a list of strings")
    check_length(name, strings, "strings", limit)
    for index, text in enumerate(strings):
        path = f"{name}[{index}]" if isinstance(value, list) else name
        if not isinstance(text, str) or not text:
            raise bad_value(path, text, "must be a non-empty string")
        if len(text) > MAX_STOP_CHARS:
            rule = f"has {len(text)} characters; at most {MAX_STOP_CHARS} are allowed"
            raise bad_value(path, text, rule)
    check_total_chars(name, strings, limit_chars)


def _check_tokens(name: str, token_ids: object, limit: int, vocab_size: int) -> None:
    if not isinstance(token_ids, list):
        raise bad_value(name, token_ids, "must be a list of token ids")
    check_length(name, token_ids, "ids", limit)
    check_token_ids(name, token_ids, vocab_size)


def _check_repetition(detection: object) -> None:
    name = "repetition_detection"
    if detection is None:
        return
    if not isinstance(detection, RepetitionDetection):
        raise bad_value(name, detection, "must be an object with max_pattern_size and min_count")
    most, least = detection.max_pattern_size, detection.min_pattern_size
    Integers(0, MAX_PATTERN_SIZE).check(f"{name}.max_pattern_size", most)
    Integers(0, MAX_PATTERN_SIZE).check(f"{name}.min_pattern_size", least)
    if least > most:
        head = f"{name}.min_pattern_size={least} is above "
        path = f"{name}.max_pattern_size"
        raise BadRequest([head, Field(path), f"={most}"], f"{name}.min_pattern_size")
    count = detection.min_count
    if not most and count:
        problem = f"needs {name}.max_pattern_size of at least 1"
        raise bad_value(f"{name}.min_count", count, problem)
    if most:
        Integers(2, MAX_PATTERN_SIZE).check(f"{name}.min_count", count)


def _check_bias(bias: object, vocab_size: int) -> None:
    if not isinstance(bias, dict):
        raise bad_value("logit_bias", bias, "must map token ids to numbers")
    check_length("logit_bias", bias, "tokens", MAX_BIASED_TOKENS)
    for token, value in bias.items():
        path = f"logit_bias[{shown(token)}]"
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadRequest(
                f"{path}: {shown(token)} is not a token id of this model; valid ids are 0 .. "
                f"{vocab_size - 1}, {vocab_size} in all",
                "logit_bias",
            )
        _BIAS.check(path, value)
