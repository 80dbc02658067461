"""Fields for sampling and routing: the same at every endpoint of OpenAI's kind."""

from __future__ import annotations

from typing import Any

from swell.cluster.text.sampling_params import (
    DERIVED_SALT,
    BadRequest,
    StructuredOutputs,
    bad_value,
)
from swell.cluster.text.schema.request_body import RequestBody
from swell.cluster.text.validate_params import Integers


class SamplingFields(RequestBody, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """OpenAI has few of the fields from here on; vLLM has them under the same names."""
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """Token id -> -100 .. 100, added to its logit."""
    bad_words: list[str] | None = None
    """Texts that the answer must not hold, as the tokenizer writes them."""
    allowed_token_ids: list[int] | None = None
    """The answer has no other tokens."""
    structured_outputs: StructuredOutputs | None = None
    """A form for the answer: json, json_object, regex, choice or grammar."""
    guided_json: dict[str, Any] | bool | str | None = None
    """This and the next fields are other names of those of `structured_outputs`."""
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None

    priority: int | None = None
    """Smaller runs first under `scheduler.policy: priority`."""
    cache_salt: str | None = None
    """Prefixes are shared only among requests of equal salt."""
    data_parallel_rank: int | None = None
    """The rank of the engine that shall serve the request."""


MAX_SALT_CHARS = 1024
_PRIORITIES = Integers(-(2**31), 2**31 - 1, optional=True)


def check_routing(cache_salt: str | None, rank: int | None, priority: int | None) -> None:
    """The fields of routing and scheduling, which do not change the answer."""
    if cache_salt == "":
        raise bad_value("cache_salt", "", "must not be empty; leave it out")
    if cache_salt is not None and cache_salt.startswith(DERIVED_SALT):
        raise bad_value("cache_salt", cache_salt, "must not begin with the character NUL")
    if cache_salt is not None and len(cache_salt) > MAX_SALT_CHARS:
        raise BadRequest(
            f"cache_salt has {len(cache_salt)} characters; at most {MAX_SALT_CHARS} are allowed",
            "cache_salt",
        )
    if rank is not None and not 0 <= rank < 2**31:
        problem = "must be at least 0 and name an engine that serves"
        raise bad_value("data_parallel_rank", rank, problem)
    _PRIORITIES.check("priority", priority)
